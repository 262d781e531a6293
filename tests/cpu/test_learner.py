"""The real Megatron learner on a CPU: log-probs, gradients, cutting, export."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.config import GkdObjective, LearnerConfig
from opd.data.packing import pack
from opd.learner.objectives import divergence, with_tail
from opd.types import Sample, TeacherScore
from tests.ranks import make_rank, random_sample, run_ranks
from tests.tiny_models import make_tiny

VOCAB = 512
MODELS = [
    pytest.param(("llama", True, 9, 3), id="llama-tied-9-heads"),
    pytest.param(("llama", False, 6, 2), id="llama-untied"),
    pytest.param(("qwen2", True, 6, 2), id="qwen2-tied"),
    pytest.param(("qwen2", False, 6, 2), id="qwen2-untied"),
    pytest.param(("qwen3", True, 6, 2), id="qwen3-tied"),
    pytest.param(("qwen3", False, 9, 3), id="qwen3-untied-9-heads"),
]
FP32 = LearnerConfig(dtype="fp32", lr=1e-3, schedule="constant", loss_chunk_tokens=16, max_tokens_per_microbatch=256)


def tiny(folder: Path, model: tuple[Any, bool, int, int], seed: int = 0) -> Path:
    family, tied, heads, kv_heads = model
    width = 48 if family == "qwen3" else 32  # of a head; not hidden size / heads in Qwen3
    return make_tiny(folder, family, tied=tied, heads=heads, kv_heads=kv_heads, head_dim=width, seed=seed)


def samples(k: int = 8, count: int = 7) -> list[Sample]:
    return [random_sample(i, VOCAB, k, prompt=3 + 5 * i, response=4 + 7 * (i % 4)) for i in range(count)]


def hf_token_logprobs(folder: Path, batch: list[Sample]) -> dict[str, np.ndarray]:
    """[R] of every sample, by transformers in fp32, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for s in batch:
        ids = torch.tensor(np.concatenate([s.prompt_ids, s.response_ids]), dtype=torch.long)
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
        rows = logp[len(s.prompt_ids) - 1 :].gather(1, ids[len(s.prompt_ids) :, None])[:, 0].numpy()
        found[s.sample_id] = rows[s.loss_mask]
    return found


def one_by_one(rank: Any, batch: list[Sample]) -> dict[str, np.ndarray]:
    """[N] of every sample, by the learner."""
    found = {}
    for s in batch:
        ((microbatch,),) = pack([s], data_parallel=1, max_tokens=512).ranks
        found[s.sample_id] = rank.topk_logprobs(microbatch, 4)[0]
    return found


def packed(rank: Any, batch: list[Sample]) -> np.ndarray:
    (microbatches,) = pack(batch, data_parallel=1, max_tokens=512).ranks
    return np.concatenate([rank.topk_logprobs(m, 4)[0] for m in microbatches])


def _parity(rank: int, port: int, folder: Path, out: Path) -> Any:
    learner = make_rank(rank, port, folder, FP32)
    before = one_by_one(learner, samples())
    together = packed(learner, samples())
    learner.export(_fresh(out / "start"))
    batch = pack(samples(), data_parallel=1, max_tokens=256)
    for _ in range(2):
        learner.forward_backward(batch.ranks[0], batch.trained_tokens)
        learner.optim_step()
    learner.export(_fresh(out / "trained"))
    return before, together, one_by_one(learner, samples())


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_learner_and_transformers_agree_before_and_after_training(
    tmp_path: Path, model: tuple[Any, bool, int, int]
) -> None:
    """Issue 2.3, B34: log-probs in fp32 within 1e-4, packed or not, and after the export of a trained model."""
    folder = tiny(tmp_path / "model", model)
    ((before, together, after),) = run_ranks(1, _parity, folder, tmp_path)
    expected = hf_token_logprobs(folder, samples())
    for name, values in expected.items():
        np.testing.assert_allclose(before[name], values, atol=1e-4)
    np.testing.assert_allclose(np.sort(together), np.sort(np.concatenate(list(before.values()))), atol=1e-5)

    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(start[name], tensor), name
    trained = hf_token_logprobs(tmp_path / "trained", samples())
    assert max(np.abs(trained[n] - expected[n]).max() for n in expected) > 0.01, "training changed nothing"
    for name, values in trained.items():
        np.testing.assert_allclose(after[name], values, atol=1e-4)


def _self_scored(learner: Any, batch: list[Sample], k: int) -> list[Sample]:
    """Score samples by the learner's own forward pass."""
    scored = []
    for s in batch:
        whole = dataclasses.replace(s, score=None, loss_mask=np.ones_like(s.loss_mask)).with_score(_no_score(s))
        ((microbatch,),) = pack([whole], data_parallel=1, max_tokens=512).ranks
        token, ids, values = learner.topk_logprobs(microbatch, k)
        ids = ids.astype(np.int32)
        covered = (ids == s.response_ids[:, None]).any(1)
        score = TeacherScore(token_logprobs=token, topk_ids=ids, topk_logprobs=values, covered=covered)
        scored.append(dataclasses.replace(s, score=score))
    return scored


def _no_score(s: Sample) -> TeacherScore:
    length = len(s.response_ids)
    return TeacherScore(
        token_logprobs=np.zeros(length, np.float32),
        topk_ids=np.zeros((length, 1), np.int32),
        topk_logprobs=np.zeros((length, 1), np.float32),
        covered=np.zeros(length, bool),
    )


def _own_teacher(rank: int, port: int, folder: Path) -> list[tuple[str, float, float]]:
    learner = make_rank(rank, port, folder, FP32)
    found = []
    for beta, k, tail in itertools.product((0.0, 0.3, 0.5, 1.0), (1, 8, VOCAB), ("bucket", "renormalize")):
        learner.objective = GkdObjective(beta=beta, tail=tail)  # type: ignore[arg-type]
        batch = pack(_self_scored(learner, samples(count=3), k), data_parallel=1, max_tokens=256)
        stats = learner.forward_backward(batch.ranks[0], batch.trained_tokens)
        norm = max(float(p.main_grad.abs().max()) for p in learner.model.parameters())
        learner.optim_step()  # clears the gradients; a zero gradient leaves Adam's weights where they are
        found.append((f"beta {beta}, K {k}, {tail}", stats.means()["loss/total"], norm))
    return found


def test_own_scores_give_no_loss_and_no_gradient(tmp_path: Path) -> None:
    """Issue 2.4: teacher = student, below 1e-6 in fp32."""
    frozen = FP32.model_copy(update={"lr": 1e-30})
    assert frozen.lr < FP32.lr
    ((*found,),) = run_ranks(1, _own_teacher, tiny(tmp_path / "model", ("llama", True, 6, 2)))
    for name, loss, gradient in found:
        assert abs(loss) < 1e-6, name
        assert gradient < 1e-6, name


def _gradient(rank: int, port: int, folder: Path, learner: LearnerConfig, order: list[int], max_tokens: int) -> Any:
    made = make_rank(rank, port, folder, learner)
    batch = samples()
    cut = pack([batch[i] for i in order], data_parallel=learner.data_parallel, max_tokens=max_tokens)
    stats = made.forward_backward(cut.ranks[rank], cut.trained_tokens)
    grads = {n: p.main_grad.double().numpy().copy() for n, p in made.model.named_parameters()}
    norm = made.optim_step().grad_norm
    weights = {n: p.detach().numpy().copy() for n, p in made.model.named_parameters()}
    return stats, grads, norm, weights, len(cut.ranks[rank])


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))


def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(tmp_path: Path) -> None:
    """Issue 2.5, B04: microbatches, packing, order, data-parallel ranks, distributed optimizer, recomputation."""
    folder = tiny(tmp_path / "model", ("qwen3", True, 6, 2))
    order = list(range(7))
    ((whole, grads, norm, weights, count),) = run_ranks(1, _gradient, folder, FP32, order, 512)
    assert count == 1
    two = FP32.model_copy(update={"data_parallel": 2})
    cases: list[tuple[str, LearnerConfig, list[int], int]] = [
        ("reversed", FP32, order[::-1], 512),
        ("2 microbatches", FP32, order, 150),
        ("one sample each", FP32, [3, 0, 6, 2, 1, 5, 4], 59),
        ("recomputed", FP32.model_copy(update={"recompute": True}), order, 150),
        ("DP 2", two, order, 512),
        ("DP 2, distributed optimizer", two.model_copy(update={"distributed_optimizer": True}), order, 80),
    ]
    for name, learner, shuffled, max_tokens in cases:
        ranks = run_ranks(learner.data_parallel, _gradient, folder, learner, shuffled, max_tokens)
        total = sum(r[0].sums["loss/total"] for r in ranks) / sum(r[0].tokens for r in ranks)
        assert total == pytest.approx(whole.means()["loss/total"], rel=1e-5), name
        for _, other, other_norm, other_weights, _ in ranks:
            assert other_norm == pytest.approx(norm, rel=1e-5), name
            if not learner.distributed_optimizer:  # whose ranks hold the summed gradient of their own shard only
                assert max(relative(other[n], grads[n]) for n in grads) < 1e-5, name
            # Adam's first step is ±lr: a gradient near zero may round to another sign, so compare most entries
            for n in weights:
                differs = np.abs(other_weights[n] - weights[n]) > 1e-5
                assert differs.mean() < 1e-3, (name, n)


def _two_steps(rank: int, port: int, folder: Path, learner: LearnerConfig) -> list[float]:
    made = make_rank(rank, port, folder, learner)
    cut = pack(samples(), data_parallel=learner.data_parallel, max_tokens=150)
    norms = []
    for _ in range(3):
        made.forward_backward(cut.ranks[rank], cut.trained_tokens)
        norms.append(made.optim_step().grad_norm)
    return norms


def test_gradients_do_not_leak_into_the_next_step(tmp_path: Path) -> None:
    """With next to no learning rate every step has the gradient of the first, in each kind of optimizer."""
    folder = tiny(tmp_path / "model", ("llama", False, 6, 2))
    still = FP32.model_copy(update={"lr": 1e-12})
    two = still.model_copy(update={"data_parallel": 2, "distributed_optimizer": True})
    for learner in (still, two, still.model_copy(update={"dtype": "bf16"})):
        for norms in run_ranks(learner.data_parallel, _two_steps, folder, learner):
            assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-4), learner.dtype


def _longer_teacher_prompt(rank: int, port: int, folder: Path, sample: Sample) -> float:
    learner = make_rank(rank, port, folder, FP32)
    batch = pack([sample], data_parallel=1, max_tokens=64)
    return learner.evaluate(batch.ranks[0]).means()["loss/forward_kl"]


def test_hand_computed_kl_with_another_teacher(tmp_path: Path) -> None:
    """Issue 2.4, B01: three prompt tokens, two response tokens, a teacher with other weights and a longer prompt."""
    folder = tiny(tmp_path / "student", ("llama", True, 6, 2))
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(tiny(tmp_path / "teacher", ("llama", True, 6, 2), seed=1))
    prompt, response, longer = [5, 9, 11], [7, 13], [400, 401, 402, 403, 404, 5, 9, 11]
    with torch.no_grad():
        s = student(torch.tensor([prompt + response])).logits[0, 2:4].log_softmax(-1)
        t = teacher(torch.tensor([longer + response])).logits[0, 7:9].log_softmax(-1)
    top = t.topk(8)
    tokens = torch.tensor(response)[:, None]
    sample = Sample(
        sample_id="hand:1",
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        loss_mask=np.ones(2, bool),
        finish_reason="stop",
        source="dataset",
        teacher="teacher",
        teacher_prompt_ids=np.array(longer, np.int32),
        score=TeacherScore(
            token_logprobs=t.gather(1, tokens)[:, 0].numpy(),
            topk_ids=top.indices.numpy().astype(np.int32),
            topk_logprobs=top.values.numpy(),
            covered=(top.indices == tokens).any(1).numpy(),
        ),
    )
    expected = divergence(with_tail(s.gather(1, top.indices), VOCAB), with_tail(top.values, VOCAB), 0.0).mean().item()
    (measured,) = run_ranks(1, _longer_teacher_prompt, folder, sample)
    assert measured == pytest.approx(expected, rel=1e-4)
    shifted = divergence(s.roll(1, 0), t, 0.0).mean().item()
    assert abs(measured - shifted) > 0.1, "the case cannot tell a shift by one row"


def _schedule(rank: int, port: int, folder: Path, learner: LearnerConfig) -> list[float]:
    made = make_rank(rank, port, folder, learner, steps=6)
    batch = pack(samples(count=2), data_parallel=1, max_tokens=256)
    found = []
    for _ in range(6):
        made.forward_backward(batch.ranks[0], batch.trained_tokens)
        found.append(made.optim_step().lr)
    made.forward_backward([], 0)
    before = made.model.head_weight.detach().clone()
    assert made.optim_step().skipped
    assert torch.equal(before, made.model.head_weight)
    return found


def test_schedule_warms_up_and_decays_and_an_empty_step_changes_nothing(tmp_path: Path) -> None:
    """B07; no step is spent at a learning rate of 0."""
    learner = FP32.model_copy(update={"schedule": "linear", "warmup_steps": 2, "min_lr": 1e-4})
    (rates,) = run_ranks(1, _schedule, tiny(tmp_path / "model", ("qwen2", False, 6, 2)), learner)
    assert rates[:2] == pytest.approx([5e-4, 1e-3])
    assert np.diff(rates[1:]) == pytest.approx([-1.8e-4] * 4)
