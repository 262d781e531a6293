"""The fused loss against autograd on dense logits, and against figures worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from opd.config import GkdObjective
from opd.learner.fused_loss import LossTargets, fused_head_loss, head_metrics
from opd.learner.objectives import TOKEN_METRICS, divergence, support, with_tail

V, H, N = 23, 8, 11


def problem(k: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, LossTargets]:
    """Hidden states, head, the teacher's dense log-probabilities, and the targets made from them."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    teacher = (torch.randn(N, V, generator=g, dtype=torch.float64) * 2).log_softmax(-1).to(dtype)
    topk = teacher.topk(k)
    token = torch.randint(0, V, (N, 1), generator=g)
    targets = LossTargets(
        ids=torch.cat([topk.indices, token], 1),
        teacher_topk=topk.values,
        from_dataset=torch.arange(N) % 3 != 0,
        sampling=torch.full((N,), torch.nan),
    )
    return hidden, weight, teacher, targets


def dense_loss(hidden: Tensor, weight: Tensor, targets: LossTargets, objective: GkdObjective) -> Tensor:
    """The same loss from logits that all exist."""
    logp = (hidden @ weight.T).log_softmax(-1)
    student = support(logp.gather(1, targets.ids[:, :-1]), V, objective)
    loss = objective.kd_weight * divergence(student, support(targets.teacher_topk, V, objective), objective.beta)
    return (loss - objective.ce_weight * logp.gather(1, targets.ids[:, -1:])[:, 0] * targets.from_dataset).sum()


OBJECTIVES = [
    GkdObjective.model_validate({"beta": beta, "tail": tail, "temperature": temperature, "ce_weight": ce})
    for beta, (tail, temperature), ce in itertools.product(
        (0.0, 0.3, 0.5, 1.0), (("bucket", 1.0), ("renormalize", 1.0), ("renormalize", 0.5)), (0.0, 0.7)
    )
] + [GkdObjective(kd_weight=0.0, ce_weight=1.3), GkdObjective(kd_weight=0.4, ce_weight=0.7)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("k", [1, 5, V])
def test_gradient_equals_autograd_on_dense_logits_in_float64(objective: GkdObjective, k: int) -> None:
    hidden, weight, _, targets = problem(k)
    expected = dense_loss(hidden, weight, targets, objective) / 7
    grads = torch.autograd.grad(expected, (hidden, weight))
    loss, sums = fused_head_loss(hidden, weight, targets, objective, scale=1 / 7, chunk_tokens=4)
    fused = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums[0] / 7, expected)
    torch.testing.assert_close(fused, grads)


def test_main_grad_receives_what_autograd_would_get() -> None:
    hidden, weight, _, targets = problem(5)
    loss, _ = fused_head_loss(hidden, weight, targets, GkdObjective(), scale=1.0, chunk_tokens=3)
    _, expected = torch.autograd.grad(loss, (hidden, weight))
    main_grad = torch.ones_like(weight)
    loss, _ = fused_head_loss(hidden, weight, targets, GkdObjective(), scale=1.0, chunk_tokens=3, main_grad=main_grad)
    (hidden_grad,) = torch.autograd.grad(loss, hidden)
    assert hidden_grad.abs().sum() > 0
    torch.testing.assert_close(main_grad, expected + 1)


def test_a_scaled_loss_is_refused_when_the_head_gradient_is_already_added() -> None:
    hidden, weight, _, targets = problem(5)
    loss, _ = fused_head_loss(
        hidden, weight, targets, GkdObjective(), scale=1.0, chunk_tokens=3, main_grad=torch.zeros_like(weight)
    )
    with pytest.raises(RuntimeError, match="already in main_grad"):
        (2 * loss).backward()


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 8, V])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_teacher_equal_to_student_gives_no_loss_and_no_gradient(beta: float, k: int, tail: str) -> None:
    """design §5, B05: in fp32, from the learner's own scores."""
    hidden, weight, _, _ = problem(k, torch.float32)
    topk = (hidden @ weight.T).log_softmax(-1).detach().topk(k)
    targets = LossTargets(
        ids=torch.cat([topk.indices, topk.indices[:, :1]], 1),
        teacher_topk=topk.values,
        from_dataset=torch.ones(N, dtype=torch.bool),
        sampling=torch.full((N,), torch.nan),
    )
    objective = GkdObjective(beta=beta, tail=tail)  # type: ignore[arg-type]
    loss, _ = fused_head_loss(hidden, weight, targets, objective, scale=1 / N, chunk_tokens=4)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert abs(loss.item()) < 1e-6
    assert max(g.abs().max().item() for g in grads) < 1e-6


def test_hand_worked_tail_bucket() -> None:
    """B05: full KL .1602, naive sum -.1723, tail bucket .1573, renormalised .0052."""
    p = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    q = torch.tensor([[0.6, 0.3, 0.04, 0.03, 0.03]], dtype=torch.float64).log()
    assert divergence(q, p, 0.0).item() == pytest.approx(0.1602, abs=5e-5)
    bucket = divergence(with_tail(q[:, :2], 5), with_tail(p[:, :2], 5), 0.0)
    assert bucket.item() == pytest.approx(0.1573, abs=5e-5)
    objective = GkdObjective(tail="renormalize")
    renormalised = divergence(support(q[:, :2], 5, objective), support(p[:, :2], 5, objective), 0.0)
    assert renormalised.item() == pytest.approx(0.0052, abs=5e-5)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_bucketed_divergence_is_between_zero_and_the_full_one(beta: float) -> None:
    g = torch.Generator().manual_seed(3)
    s, t = ((torch.randn(500, V, generator=g, dtype=torch.float64) * 3).log_softmax(-1) for _ in range(2))
    full = divergence(s, t, beta)
    for k in (1, 4, 12):
        ids = t.topk(k).indices
        part = divergence(with_tail(s.gather(1, ids), V), with_tail(t.gather(1, ids), V), beta)
        assert (part > -1e-9).all()
        assert (part <= full + 1e-5).all()


def test_temperature_divides_logits() -> None:
    """B09: logits [2, 1, 0] at temperature 0.5."""
    logp = torch.tensor([[2.0, 1.0, 0.0]]).log_softmax(-1)
    objective = GkdObjective(tail="renormalize", temperature=0.5)
    expected = torch.tensor([[-0.1429, -2.1429, -4.1429]])
    torch.testing.assert_close(support(logp, 3, objective), expected, atol=1e-4, rtol=0)


def test_temperature_with_the_tail_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match='tail="renormalize"'):
        GkdObjective(temperature=0.9)


def test_metrics_are_the_dense_ones() -> None:
    hidden, weight, teacher, targets = problem(V)
    sums: dict[str, float] = dict(
        zip(TOKEN_METRICS, head_metrics(hidden, weight, targets, GkdObjective(), chunk_tokens=4).tolist(), strict=True)
    )
    student = (hidden @ weight.T).log_softmax(-1)
    expected = {
        "loss/forward_kl": (teacher.exp() * (teacher - student)).sum(),
        "loss/reverse_kl": (student.exp() * (student - teacher)).sum(),
        "loss/cross_entropy": -student.gather(1, targets.ids[:, -1:]).sum(),
        "student/entropy": -(student.exp() * student).sum(),
        "teacher/entropy": -(teacher.exp() * teacher).sum(),
        "student/topk_mass": torch.tensor(N),
        "teacher/topk_mass": torch.tensor(N),
        "score/coverage": torch.tensor(N),
    }
    for name, value in expected.items():
        assert sums[name] == pytest.approx(value.item()), name


def test_no_trained_token_gives_zero() -> None:
    """B07."""
    hidden, weight, _, targets = problem(5)
    none = targets.rows(slice(0, 0))
    loss, sums = fused_head_loss(hidden[:0], weight, none, GkdObjective(), scale=1.0, chunk_tokens=4)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0.0
    assert sums.abs().sum() == 0
    assert all(g.abs().sum() == 0 for g in grads)


def test_bf16_inputs_lose_no_precision_in_the_logits() -> None:
    """B10: identical bf16 models have a KL of 0, and the loss of the same weights in fp32."""
    g = torch.Generator().manual_seed(1)
    hidden = (torch.randn(64, 64, generator=g) * 2).bfloat16()
    weight = (torch.randn(4096, 64, generator=g) * 0.5).bfloat16()
    topk = (hidden.float() @ weight.float().T).log_softmax(-1).topk(64)
    targets = LossTargets(
        ids=torch.cat([topk.indices, topk.indices[:, :1]], 1),
        teacher_topk=topk.values,
        from_dataset=torch.ones(64, dtype=torch.bool),
        sampling=torch.full((64,), torch.nan),
    )
    sums = head_metrics(hidden, weight, targets, GkdObjective(), chunk_tokens=16)
    means = dict(zip(TOKEN_METRICS, (sums / 64).tolist(), strict=True))
    assert -1e-6 < means["loss/forward_kl"] < 1e-5
    wide = head_metrics(hidden.float(), weight.float(), targets, GkdObjective(), chunk_tokens=16)
    torch.testing.assert_close(sums, wide, atol=2e-3, rtol=5e-4)
    assert math.isfinite(means["student/entropy"])
