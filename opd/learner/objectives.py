"""The objectives, as functions of log-probabilities; `[N, K]` in, `[N]` out. docs/objectives.md has the formulas.

An objective sees the student only through its log-probabilities of the K ids that the teacher kept and of the response
token. `fused_loss.py` turns the gradient by these into the gradient by the logits, whatever the objective is.

Shapes: `N` trained tokens, `K` teacher ids kept per position, `C` classes of the support that is compared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opd.config import GkdObjective

TAIL_FLOOR = 1e-6
"""Mass below which a tail is not resolved: fp32 log-probabilities made from logits near 20 are off by 1e-6 each."""

TOKEN_METRICS = (
    "loss/total",
    "loss/forward_kl",
    "loss/reverse_kl",
    "loss/cross_entropy",
    "student/entropy",
    "teacher/entropy",
    "student/topk_mass",
    "teacher/topk_mass",
    "score/coverage",
    "rollout/logprob_gap",
)
"""What every pass measures, in the order of the columns of `token_metrics`."""


def with_tail(logprobs: Tensor, vocab_size: int) -> Tensor:
    """Append the tail class, the mass outside the K ids, unless the K ids are the whole vocabulary.

    Args:
        logprobs: [N, K] over the whole vocabulary.
        vocab_size: V.

    Returns:
        [N, K+1], or [N, K] for K = V. A tail lighter than `TAIL_FLOOR` is set to it and has no gradient.
    """
    if logprobs.shape[-1] == vocab_size:
        return logprobs
    tail = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(TAIL_FLOOR)
    return torch.cat([logprobs, tail.log()], dim=-1)


def support(logprobs: Tensor, vocab_size: int, objective: GkdObjective) -> Tensor:
    """Give the log-probabilities [N, C] of the classes on which student and teacher are compared."""
    if objective.tail == "renormalize":
        return (logprobs / objective.temperature).log_softmax(-1)
    return with_tail(logprobs, vocab_size)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalised divergence of two distributions (Agarwal et al. 2024, arXiv 2306.13649, eq. 4, its ends as there).

    Args:
        student: [N, C] log-probabilities.
        teacher: [N, C] log-probabilities.
        beta: 0 gives KL(T||S), 1 gives KL(S||T), between: beta KL(T||M) + (1-beta) KL(S||M), M = beta T + (1-beta) S.

    Returns:
        [N] nats.
    """
    if beta == 0.0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1.0:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    to_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    to_student = (student.exp() * (student - mixture)).sum(-1)
    return beta * to_teacher + (1.0 - beta) * to_student


def gkd_loss(
    student_topk: Tensor,
    student_token: Tensor,
    teacher_topk: Tensor,
    from_dataset: Tensor,
    vocab_size: int,
    objective: GkdObjective,
) -> Tensor:
    """Loss of every trained token.

    Args:
        student_topk: [N, K] the student's log-probabilities of the teacher's ids.
        student_token: [N] the student's log-probability of the response token.
        teacher_topk: [N, K] the teacher's log-probabilities.
        from_dataset: [N] bool: where the cross-entropy term counts.
        vocab_size: V.
        objective: which divergence, and the weights.

    Returns:
        [N] nats, not yet divided by anything.
    """
    loss = torch.zeros_like(student_token)
    if objective.kd_weight:
        student, teacher = (support(topk, vocab_size, objective) for topk in (student_topk, teacher_topk))
        loss = loss + objective.kd_weight * divergence(student, teacher, objective.beta)
    if objective.ce_weight:
        loss = loss - objective.ce_weight * student_token * from_dataset
    return loss


def token_metrics(
    loss: Tensor,
    student_topk: Tensor,
    student_token: Tensor,
    student_entropy: Tensor,
    teacher_topk: Tensor,
    covered: Tensor,
    sampling: Tensor,
    vocab_size: int,
) -> Tensor:
    """Give the `TOKEN_METRICS` of every token as columns; KLs and teacher entropy on top K + tail, at τ = 1.

    The gap to the log-probability at sampling time is 0 for a token that was not sampled: see `metrics.step_values`.
    """
    student, teacher = with_tail(student_topk, vocab_size), with_tail(teacher_topk, vocab_size)
    return torch.stack(
        [
            loss,
            divergence(student, teacher, 0.0),
            divergence(student, teacher, 1.0),
            -student_token,
            student_entropy,
            -(teacher.exp() * teacher).sum(-1),
            student_topk.exp().sum(-1),
            teacher_topk.exp().sum(-1),
            covered.to(loss.dtype),
            (student_token - sampling).abs().nan_to_num(nan=0.0).to(loss.dtype),
        ],
        dim=-1,
    )
