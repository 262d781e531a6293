"""Real vLLM on tiny random models: both ways of scoring agree with transformers.

The engines run one after another in one child process, so that vLLM is imported once and never into pytest.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from opd.config import TeacherConfig
from opd.device import HostProfile
from opd.score.engine import TeacherEngine
from opd.score.ray_engine import teacher_pool
from opd.score.requests import ScoredTokens, ScoreRequest
from tests.tiny_models import Family, make_tiny

VOCAB, LONGEST = 512, 200
CPU = HostProfile.cpu(num_cpus=2)
WAYS = ("hidden_states", "prompt_logprobs")


def _prepare_child() -> None:
    os.environ.update(CPU.engine_env, OMP_NUM_THREADS="2", HF_HUB_OFFLINE="1")


def _score_in_child(
    settings: dict[str, Any],
    folder: Path,
    top_k: int,
    vocab_size: int,
    batches: Sequence[Sequence[ScoreRequest]],
    longest: int = LONGEST,
) -> list[list[ScoredTokens]]:
    from vllm.distributed import cleanup_dist_env_and_memory

    config = TeacherConfig.model_validate({"model": str(folder), "dtype": "fp32", "kv_cache_gib": 0.1} | settings)
    engine = TeacherEngine(config, str(folder), top_k, vocab_size, longest, CPU)
    try:
        info = engine.ready()
        assert (info.pid, info.window, info.vocab_size) == (os.getpid(), longest, vocab_size)
        replies = [engine.score(batch) for batch in batches]
        assert all(0.1 < reply.memory_gib < 16 for reply in replies)
        return [list(reply.answers) for reply in replies]
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_child) as executor:
        yield executor


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by family; Llama's and Qwen3's heads are their own, Qwen2's is tied."""
    made = {f: make_tiny(tmp_path_factory.mktemp(f), f, tied=f == "qwen2", vocab=VOCAB) for f in get_args(Family)}
    nine = make_tiny(tmp_path_factory.mktemp("nine"), "llama", tied=True, vocab=VOCAB, heads=9, kv_heads=3)
    return made | {"llama_9_heads": nine}


def requests(count: int, *, shared: int = 0, vocab: int = VOCAB, longest: int = LONGEST) -> list[ScoreRequest]:
    """Random sequences of many lengths; the first `shared` tokens are the same. The first is as long as allowed."""
    rng = np.random.default_rng(count)
    start = rng.integers(vocab, size=shared, dtype=np.int32)
    made = []
    for i in range(count):
        length = longest if i == 0 else int(rng.integers(shared + 3, longest))
        rest = rng.integers(vocab, size=length - shared, dtype=np.int32)
        made.append(
            ScoreRequest(ids=np.concatenate([start, rest]), first_response=int(rng.integers(max(1, shared), length)))
        )
    made.append(ScoreRequest(ids=np.array([3, 4], np.int32), first_response=1))
    return made


@lru_cache
def in_transformers(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference(folder: Path, request: ScoreRequest, vocab_size: int) -> np.ndarray:
    """[R, vocab_size] log-probabilities by transformers in fp32."""
    with torch.no_grad():
        logits = in_transformers(folder)(torch.tensor(request.ids[None].astype(np.int64))).logits[0]
    logits = logits[request.first_response - 1 : -1]
    return logits[:, :vocab_size].log_softmax(-1).numpy()


def assert_right(folder: Path, sent: Sequence[ScoreRequest], given: Sequence[ScoredTokens], k: int, vocab: int) -> None:
    assert len(given) == len(sent)
    for request, answer in zip(sent, given, strict=True):
        response, score = request.ids[request.first_response :], answer.score
        expected = reference(folder, request, vocab)
        rows = np.arange(len(response))[:, None]
        np.testing.assert_array_equal(answer.scored_ids, response)
        np.testing.assert_allclose(score.token_logprobs, expected[rows[:, 0], response], atol=1e-4, rtol=0)
        np.testing.assert_allclose(score.topk_logprobs, expected[rows, score.topk_ids], atol=1e-4, rtol=0)
        best = -np.sort(-expected, axis=1)[:, :k]
        np.testing.assert_allclose(score.topk_logprobs, best, atol=1e-4, rtol=0)
        assert (np.diff(score.topk_logprobs, axis=1) <= 0).all(), "not likeliest first"
        assert all(len(set(row)) == k for row in score.topk_ids.tolist()), "an id twice"
        np.testing.assert_array_equal(score.covered, (score.topk_ids == response[:, None]).any(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama_9_heads"])
def test_scores_agree_with_transformers(
    child: ProcessPoolExecutor, models: dict[str, Path], name: str, way: str
) -> None:
    sent = requests(6)
    (given,) = child.submit(_score_in_child, {"scoring": way}, models[name], 8, VOCAB, [sent]).result()
    assert_right(models[name], sent, given, 8, VOCAB)
    covered = np.concatenate([answer.score.covered for answer in given])
    assert 0 < covered.sum() < len(covered), "both kinds of tokens should be here"


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_vocabulary_can_be_kept(child: ProcessPoolExecutor, models: dict[str, Path], way: str) -> None:
    sent = requests(3)
    (given,) = child.submit(_score_in_child, {"scoring": way}, models["llama"], VOCAB, VOCAB, [sent]).result()
    assert_right(models["llama"], sent, given, VOCAB, VOCAB)
    for answer in given:
        assert answer.score.covered.all()
        np.testing.assert_allclose(np.exp(answer.score.topk_logprobs).sum(1), 1.0, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_padded_vocabulary_rows_get_no_probability(
    child: ProcessPoolExecutor, models: dict[str, Path], way: str
) -> None:
    sent = requests(3, vocab=500)
    (given,) = child.submit(_score_in_child, {"scoring": way}, models["qwen2"], 500, 500, [sent]).result()
    assert_right(models["qwen2"], sent, given, 500, 500)


@pytest.mark.parametrize("way", WAYS)
def test_chunks_shared_prefixes_and_repeats_change_nothing(
    child: ProcessPoolExecutor, models: dict[str, Path], way: str
) -> None:
    sent = requests(12, shared=90)
    settings = {"scoring": way, "max_batched_tokens": 64, "kv_cache_gib": 0.001}
    job = child.submit(_score_in_child, settings, models["llama"], 8, VOCAB, [sent, sent[:2], sent])
    for part, given in zip((sent, sent[:2], sent), job.result(), strict=True):
        assert_right(models["llama"], part, given, 8, VOCAB)


def test_both_ways_agree_in_bf16(child: ProcessPoolExecutor, models: dict[str, Path]) -> None:
    sent = requests(6)
    jobs = [
        child.submit(_score_in_child, {"scoring": way, "dtype": "bf16"}, models["qwen3"], 8, VOCAB, [sent])
        for way in WAYS
    ]
    hidden, prompt = (job.result()[0] for job in jobs)
    for a, b in zip(hidden, prompt, strict=True):
        # Far below bf16's own resolution of about 0.03 here: the logits of both are fp32.
        np.testing.assert_allclose(a.score.token_logprobs, b.score.token_logprobs, atol=1e-4, rtol=0)
        np.testing.assert_allclose(a.score.topk_logprobs, b.score.topk_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_more_ids_than_the_teacher_has_are_refused(
    child: ProcessPoolExecutor, models: dict[str, Path], way: str
) -> None:
    job = child.submit(_score_in_child, {"scoring": way}, models["llama"], 8, VOCAB + 1, [])
    with pytest.raises(ValueError, match="512 ids, fewer than the 513"):
        job.result()


@pytest.mark.parametrize("way", WAYS)
def test_samples_longer_than_the_teacher_reads_are_refused(
    child: ProcessPoolExecutor, models: dict[str, Path], way: str
) -> None:
    job = child.submit(_score_in_child, {"scoring": way}, models["llama"], 8, VOCAB, [], 513)
    with pytest.raises(ValueError, match=r"(?s)max_model_len \(51[34]\) is greater than .*512.*data.max_prompt_tokens"):
        job.result()


def test_a_top_k_above_the_vocabulary_is_refused_before_anything_starts(models: dict[str, Path]) -> None:

    config = TeacherConfig.model_validate({"model": "unused"})
    with pytest.raises(ValueError, match=r"top_k is 513 but teacher teacher has 512 ids"):
        teacher_pool(config, folder=models["llama"], top_k=VOCAB + 1, vocab_size=VOCAB, longest=LONGEST, profile=CPU)
