"""Real vLLM on tiny random models: the student's answers and their log-probabilities agree with transformers.

The engines run one after another in one child process, so that vLLM is imported once and never into pytest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from opd.cluster import ray_session
from opd.config import Dtype, RolloutConfig
from opd.device import HostProfile
from opd.rollout.engine import StudentEngine
from opd.rollout.pool import RolloutCounters
from opd.rollout.ray_engine import student_pool
from opd.rollout.requests import Answer, RolloutRequest
from opd.turns import Turns
from opd.types import Prompt, Sample
from tests.tiny_models import make_tiny

VOCAB, LONGEST, NEW = 512, 96, 40
ENDS = [1, 7, 40, 41, 42, 43, 44, 45]
"""Enough that some answers end early."""
CPU = HostProfile.cpu(num_cpus=2)


def _prepare_child() -> None:
    os.environ.update(CPU.engine_env, OMP_NUM_THREADS="2", HF_HUB_OFFLINE="1", VLLM_USE_V2_MODEL_RUNNER="0")


def _answer_in_child(
    folder: Path,
    batches: Sequence[Sequence[RolloutRequest]],
    *,
    vocab_size: int = VOCAB,
    num_token_ids: int | None = None,
    cancel: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Answer]]:
    """Answer batches one after another in a new engine; `cancel` is dropped after the first pump of each."""
    from vllm.distributed import cleanup_dist_env_and_memory

    config = RolloutConfig.model_validate({"kv_cache_gib": 0.05, **(settings or {})})
    engine = StudentEngine(
        config,
        "fp32",
        str(folder),
        vocab_size,
        ENDS,
        LONGEST,
        CPU,
        0,
        weight_transfer=False,
        num_token_ids=num_token_ids,
    )
    try:
        info = engine.ready()
        assert (info.pid, info.window, info.vocab_size) == (os.getpid(), LONGEST, vocab_size)
        given = []
        for batch in batches:
            answers: dict[str, Answer] = {}
            left = {request.key for request in batch}
            new, dropped = batch, ()
            generated = 0
            while left:
                reply = engine.pump(new, dropped, 0.02)
                assert 0.1 < reply.memory_gib < 16
                generated += reply.generated_tokens
                answers |= {answer.key: answer for answer in reply.answers}
                left -= {answer.key for answer in reply.answers} | set(cancel)
                new, dropped = (), cancel if new else ()
            if not cancel:
                assert generated == sum(len(answer.response_ids) for answer in answers.values())
            given.append(answers)
        assert engine.pump((), (), 60.0).busy_s < 10, "it waited although nothing is left"
        return given
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def _sync_in_child(
    folder: Path, new: Path, dtype: Dtype, batch: Sequence[RolloutRequest], steps: int
) -> dict[str, Answer]:
    """Answer, with the weights of `new` as version 3 after some steps; they come from its file."""
    from safetensors.torch import load_file
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.plugins import load_general_plugins

    @dataclasses.dataclass
    class Update(WeightTransferUpdateInfo):
        path: str

    class FromFile(WeightTransferEngine[WeightTransferInitInfo, Update]):
        init_info_cls, update_info_cls = WeightTransferInitInfo, Update

        def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Update) -> None:
            load_weights: Any = self.model.load_weights
            load_weights(load_file(update_info.path).items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    load_general_plugins()
    WeightTransferEngineFactory._registry["opd"] = lambda: FromFile  # instead of the plug-in's
    config = RolloutConfig.model_validate({"kv_cache_gib": 0.05})
    engine = StudentEngine(config, dtype, str(folder), VOCAB, ENDS, LONGEST, CPU, 0)
    try:
        engine.ready()
        replies = [engine.pump(batch if step == 0 else (), (), 0.0) for step in range(steps)]
        engine.open_channel({})
        engine.receive(3, {"path": str(new / "model.safetensors")})
        replies.append(engine.pump((), (), 60.0))
        return {answer.key: answer for reply in replies for answer in reply.answers}
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
    return {
        "qwen3": make_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True, vocab=VOCAB),
        "llama": make_tiny(tmp_path_factory.mktemp("llama"), "llama", tied=False, vocab=VOCAB),
    }


@pytest.fixture(scope="module")
def sampled(child: ProcessPoolExecutor, models: dict[str, Path]) -> dict[str, Answer]:
    """What qwen3 answers to `requests(16)`."""
    (answers,) = child.submit(_answer_in_child, models["qwen3"], [requests(16)]).result()
    return answers


def requests(count: int, *, vocab: int = VOCAB, **changes: Any) -> list[RolloutRequest]:
    """Prompts of many lengths with a common start, at the temperature 1 that is usual."""
    rng = np.random.default_rng(count)
    start = rng.integers(vocab, size=20, dtype=np.int32)
    made = []
    for i in range(count):
        rest = rng.integers(vocab, size=int(rng.integers(1, 30)), dtype=np.int32)
        request = RolloutRequest(
            key=f"r{i}",
            prompt_ids=np.concatenate([start, rest]),
            seed=i,
            max_new_tokens=NEW,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        )
        made.append(dataclasses.replace(request, **changes))
    return made


def renamed(batch: Sequence[RolloutRequest], prefix: str, **changes: Any) -> list[RolloutRequest]:
    return [dataclasses.replace(request, key=f"{prefix}{request.key}", **changes) for request in batch]


@lru_cache
def in_transformers(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs_in_transformers(folder: Path, answer: Answer, vocab_size: int = VOCAB) -> np.ndarray:
    """[R] log-probabilities at temperature 1, over all ids that count."""
    ids = torch.tensor(np.concatenate([answer.prompt_ids, answer.response_ids])[None].astype(np.int64))
    with torch.no_grad():
        logits = in_transformers(folder)(ids).logits[0, len(answer.prompt_ids) - 1 : -1, :vocab_size]
    return logits.log_softmax(-1).numpy()[np.arange(len(answer.response_ids)), answer.response_ids]


def assert_logprobs(folder: Path, answer: Answer, vocab_size: int = VOCAB) -> None:
    expected = logprobs_in_transformers(folder, answer, vocab_size)
    np.testing.assert_allclose(answer.sampling_logprobs, expected, atol=1e-3, rtol=0)


def assert_sound(batch: Sequence[RolloutRequest], answers: Mapping[str, Answer]) -> None:
    assert set(answers) == {request.key for request in batch}
    for request in batch:
        answer = answers[request.key]
        np.testing.assert_array_equal(answer.prompt_ids, request.prompt_ids)
        assert len(answer.response_ids) == len(answer.sampling_logprobs) == len(answer.weight_versions)
        assert answer.weight_versions.tolist() == [0] * len(answer.response_ids)
        ends = np.isin(answer.response_ids, ENDS)
        assert not ends[:-1].any(), "it went on after an end token"
        if answer.finish_reason == "stop":
            assert ends[-1], "the end token is missing"
        else:
            assert not ends[-1]
            assert len(answer.response_ids) == request.max_new_tokens


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_greedy_answers_are_those_of_transformers(
    child: ProcessPoolExecutor, models: dict[str, Path], name: str
) -> None:
    batch = requests(6, temperature=0.0)
    (answers,) = child.submit(_answer_in_child, models[name], [batch]).result()
    assert_sound(batch, answers)
    for request in batch:
        generate: Any = in_transformers(models[name]).generate
        expected = generate(
            torch.tensor(request.prompt_ids[None].astype(np.int64)),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=ENDS,
            pad_token_id=0,
        )
        assert answers[request.key].response_ids.tolist() == expected[0, len(request.prompt_ids) :].tolist()
        assert_logprobs(models[name], answers[request.key])


def test_sampled_answers_are_sound_and_repeat_by_seed(
    child: ProcessPoolExecutor, models: dict[str, Path], sampled: dict[str, Answer]
) -> None:
    batch = requests(16)
    assert_sound(batch, sampled)
    assert {answer.finish_reason for answer in sampled.values()} == {"stop", "length"}, "both kinds should be here"
    # Another engine, in another order, with other requests beside.
    again, others = renamed(batch[::-1], "again "), renamed(batch, "other ", seed=1000)
    first, second = child.submit(
        _answer_in_child, models["qwen3"], [again, others], settings={"max_running": 5}
    ).result()
    for key, answer in sampled.items():
        assert_logprobs(models["qwen3"], answer)
        ids = answer.response_ids.tolist()
        assert first[f"again {key}"].response_ids.tolist() == ids, "the same seed gave another answer"
        assert second[f"other {key}"].response_ids.tolist() != ids, "another seed gave the same answer"


def test_logprobs_are_at_temperature_1_over_all_ids_however_it_is_sampled(
    child: ProcessPoolExecutor, models: dict[str, Path]
) -> None:
    ways = [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}]
    batch = [request for i, way in enumerate(ways) for request in renamed(requests(3), f"{i} ", **way)]
    (answers,) = child.submit(_answer_in_child, models["llama"], [batch]).result()
    assert_sound(batch, answers)
    for answer in answers.values():
        assert_logprobs(models["llama"], answer)


def test_the_models_own_generation_config_changes_nothing(
    child: ProcessPoolExecutor, models: dict[str, Path], sampled: dict[str, Answer], tmp_path: Path
) -> None:
    own = shutil.copytree(models["qwen3"], tmp_path / "own")
    settings = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.9, "eos_token_id": 3, "max_new_tokens": 2}
    (own / "generation_config.json").write_text(json.dumps(settings | {"do_sample": True}))
    (given,) = child.submit(_answer_in_child, own, [requests(16)]).result()
    for key, answer in sampled.items():
        assert answer.response_ids.tolist() == given[key].response_ids.tolist()


@pytest.mark.parametrize("counted", [True, False])
def test_padding_ids_are_never_sampled(child: ProcessPoolExecutor, models: dict[str, Path], counted: bool) -> None:
    # Half of the ids are padding. Greedy and top-k requests together: the sampler writes "no top-k" as a width.
    vocab_size = VOCAB if counted else VOCAB // 2  # padding that the learner counts has probability all the same
    half = VOCAB // 2
    ways = [{}, {"top_k": 5}, {"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 0.9}]
    batch = [request for i, way in enumerate(ways) for request in renamed(requests(4, vocab=half), f"{i} ", **way)]
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "num_token_ids": half}
    (answers,) = child.submit(_answer_in_child, models["llama"], [batch], **sizes).result()
    assert_sound(batch, answers)
    for answer in answers.values():
        assert answer.response_ids.max() < half
        assert_logprobs(models["llama"], answer, vocab_size=vocab_size)


def test_a_dropped_request_is_not_answered(child: ProcessPoolExecutor, models: dict[str, Path]) -> None:
    batch = requests(6, temperature=0.0)
    # The first pump lasts one step, in which no answer can end.
    (answers,) = child.submit(
        _answer_in_child, models["qwen3"], [batch], cancel=["r1", "r4"], settings={"max_batched_tokens": 24}
    ).result()
    assert set(answers) == {"r0", "r2", "r3", "r5"}


def test_an_end_token_in_the_last_place_counts(
    child: ProcessPoolExecutor, models: dict[str, Path], sampled: dict[str, Answer]
) -> None:
    lengths = {key: len(a.response_ids) for key, a in sampled.items() if a.finish_reason == "stop"}
    exact = [dataclasses.replace(r, max_new_tokens=lengths[r.key]) for r in requests(16) if r.key in lengths]
    (given,) = child.submit(_answer_in_child, models["qwen3"], [exact]).result()
    assert exact
    for request in exact:
        assert given[request.key].finish_reason == "stop"
        assert given[request.key].response_ids.tolist() == sampled[request.key].response_ids.tolist()


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-3), ("bf16", 0.5)])  # old weights are off by 2
def test_answers_under_way_go_on_with_new_weights(
    child: ProcessPoolExecutor, models: dict[str, Path], tmp_path: Path, dtype: Dtype, tolerance: float
) -> None:
    new = make_tiny(tmp_path, "llama", tied=False, vocab=VOCAB, seed=1)
    batch, steps = requests(8), 6
    answers = child.submit(_sync_in_child, models["llama"], new, dtype, batch, steps).result()
    assert set(answers) == {request.key for request in batch}
    assert any(len(a.response_ids) > steps for a in answers.values())
    for answer in answers.values():
        length = len(answer.response_ids)
        assert answer.weight_versions.tolist() == [0] * min(steps, length) + [3] * max(0, length - steps)
        # A value that was cached with the old weights would show in every later token.
        old = answer.weight_versions == 0
        for folder, rows in ((models["llama"], old), (new, ~old)):
            expected = logprobs_in_transformers(folder, answer)
            np.testing.assert_allclose(answer.sampling_logprobs[rows], expected[rows], atol=tolerance, rtol=0)


def test_a_killed_engine_costs_no_answers(
    models: dict[str, Path], sampled: dict[str, Answer], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> tuple[list[Sample], RolloutCounters]:
        config = RolloutConfig.model_validate(
            {"kv_cache_gib": 0.05, "num_engines": 2, "poll_s": 0.01, "max_new_tokens": NEW}
        )
        pool = student_pool(
            config,
            dtype="fp32",
            folder=models["qwen3"],
            vocab_size=VOCAB,
            end_token_ids=ENDS,
            longest=LONGEST,
            profile=CPU,
            seed=0,
            turns=Turns(shared_cores=True),
            weight_transfer=False,
        )
        await pool.start()
        try:
            prompts = [
                Prompt(sample_id=request.key, prompt_ids=request.prompt_ids, teacher="t") for request in requests(16)
            ]
            victim = pool.engine_infos()[0].pid
            os.kill(victim, signal.SIGSTOP)  # so that it surely has work when it is killed
            answering = asyncio.gather(*(pool.answer(prompt, seed=i) for i, prompt in enumerate(prompts)))
            await asyncio.sleep(0.5)
            os.kill(victim, signal.SIGKILL)
            return await answering, pool.counters()
        finally:
            await pool.close()

    with ray_session(CPU), caplog.at_level(logging.WARNING):
        samples, counters = asyncio.run(main())
    assert counters.restarts == 1
    assert "rollout engine 0 (pid" in caplog.text
    assert "was lost while answering prompts" in caplog.text
    for sample in samples:
        assert sample.response_ids.tolist() == sampled[sample.sample_id].response_ids.tolist()
        assert sample.rollout is not None
        np.testing.assert_allclose(
            sample.rollout.sampling_logprobs, sampled[sample.sample_id].sampling_logprobs, atol=1e-4, rtol=0
        )
