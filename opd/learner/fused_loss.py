"""lm_head and objective together, a chunk of tokens at a time, so that the logits of all tokens never exist.

For a chunk of `C` tokens the logits `z [C, V]` are made, turned into probabilities `p` in place, and left behind as the
gradients of hidden states and head. An objective is a function of the log-probabilities `a = z[ids] - lse` of a few ids
only (`objectives.py`), with gradient `g = ∂loss/∂a` from autograd on `[C, K+1]`. Since `∂a_k/∂z_j = δ_jk - p_j`,

    ∂loss/∂z = scatter(g at ids) - (Σ_k g_k) p

holds for every objective. The hidden gradient is `c·(p W) + Σ_k g_k W[id_k]` with `c = -Σ_k g_k`, and `p W` also gives
the student's exact entropy, `lse - (p W)·h`, at no further pass over the logits.

Shapes: `N` trained tokens, `C` of one chunk, `H` hidden size, `V` vocabulary, `K` teacher ids kept per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opd.config import GkdObjective
from opd.learner.objectives import TOKEN_METRICS, gkd_loss, token_metrics
from opd.matmul import fp32_precision

_VOCAB_BLOCK = 8192
"""Rows of the head, or columns of the probabilities, that are converted to another type at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTargets:
    """What the trained tokens of a microbatch are compared with."""

    ids: Tensor
    """[N, K+1] the teacher's ids, then the response token."""
    teacher_topk: Tensor
    """[N, K] log-probabilities."""
    from_dataset: Tensor
    """[N] bool."""
    sampling: Tensor
    """[N] log-probabilities at sampling time; NaN where the token comes from a data set."""

    def rows(self, chunk: slice) -> LossTargets:
        """Give the targets of some tokens."""
        return LossTargets(
            ids=self.ids[chunk],
            teacher_topk=self.teacher_topk[chunk],
            from_dataset=self.from_dataset[chunk],
            sampling=self.sampling[chunk],
        )


def logits_fp32(hidden: Tensor, weight: Tensor) -> Tensor:
    """Give `hidden @ weight.T` [C, V] in fp32 at least, accumulated in fp32 whatever the inputs' type."""
    if hidden.dtype != torch.bfloat16:
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    logits = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)
    wide = hidden.float()
    with fp32_precision("bf16"):
        for start in range(0, weight.shape[0], _VOCAB_BLOCK):
            block = slice(start, start + _VOCAB_BLOCK)
            torch.mm(wide, weight[block].float().T, out=logits[:, block])
    return logits


def _expected_row(probs: Tensor, weight: Tensor) -> Tensor:
    """Give `probs @ weight` [C, H] in the type of `probs`, without a copy of all of `probs` in the type of `weight`."""
    expected = torch.zeros(probs.shape[0], weight.shape[1], dtype=probs.dtype, device=probs.device)
    for start in range(0, weight.shape[0], _VOCAB_BLOCK):
        block = slice(start, start + _VOCAB_BLOCK)
        expected += probs[:, block].to(weight.dtype) @ weight[block]
    return expected


def _add_weight_grad(weight_grad: Tensor, logit_grad: Tensor, hidden: Tensor) -> None:
    """`weight_grad [V, H] += logit_grad.T @ hidden`, accumulated in the type of `weight_grad`."""
    if hidden.dtype != torch.bfloat16:
        weight_grad.addmm_(logit_grad.T, hidden)
    elif hidden.is_cuda:
        weight_grad.add_(torch.mm(logit_grad.to(hidden.dtype).T, hidden, out_dtype=torch.float32))
    else:
        with fp32_precision("bf16"):
            weight_grad.addmm_(logit_grad.T, hidden.float())


def _chunk_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: LossTargets,
    objective: GkdObjective,
    scale: float,
    weight_grad: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Give the metrics [C, len(TOKEN_METRICS)] and the hidden gradient [C, H] of one chunk; add to `weight_grad`."""
    probs = logits_fp32(hidden, weight)  # [C, V]; logits first, probabilities below, in the same memory
    vocab_size = weight.shape[0]
    picked = probs.gather(1, targets.ids)
    peak = probs.amax(1, keepdim=True)
    total = probs.sub_(peak).exp_().sum(1, keepdim=True)
    log_normalizer = total.log() + peak
    probs.mul_(total.reciprocal())
    expected_row = _expected_row(probs, weight)  # [C, H] = p W
    entropy = log_normalizer[:, 0] - (expected_row * hidden.to(probs.dtype)).sum(1)

    logprobs = (picked - log_normalizer).requires_grad_(weight_grad is not None)  # [C, K+1]
    with torch.set_grad_enabled(weight_grad is not None):
        topk, token = logprobs[:, :-1], logprobs[:, -1]
        loss = gkd_loss(topk, token, targets.teacher_topk, targets.from_dataset, vocab_size, objective)
    covered = (targets.ids[:, :-1] == targets.ids[:, -1:]).any(1)
    with torch.no_grad():
        metrics = token_metrics(loss, topk, token, entropy, targets.teacher_topk, covered, targets.sampling, vocab_size)
    if weight_grad is None:
        return metrics, None

    (grad,) = torch.autograd.grad(loss, logprobs, torch.full_like(loss, scale))  # [C, K+1]
    coefficient = -grad.sum(1, keepdim=True)
    sparse = torch.bmm(grad[:, None].to(weight.dtype), weight[targets.ids])[:, 0]  # Σ_k g_k W[id_k]
    hidden_grad = (coefficient * expected_row + sparse).to(hidden.dtype)
    _add_weight_grad(weight_grad, probs.mul_(coefficient).scatter_add_(1, targets.ids, grad), hidden)
    return metrics, hidden_grad


class _FusedHeadLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits exist."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: LossTargets,
        objective: GkdObjective,
        scale: float,
        chunk_tokens: int,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=wide) if main_grad is None else main_grad
        hidden_grad = torch.empty_like(hidden)
        sums = torch.zeros(len(TOKEN_METRICS), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, hidden.shape[0]))
            metrics, grad = _chunk_loss(hidden[rows], weight, targets.rows(rows), objective, scale, weight_grad)
            assert grad is not None
            hidden_grad[rows] = grad
            sums += metrics.sum(0)
        ctx.grads = (
            hidden_grad,
            (weight_grad if main_grad is None else None),
        )  # not saved tensors: scaled in place below
        ctx.mark_non_differentiable(sums)
        return sums[0] * scale, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        upstream = grads[0].item()
        hidden_grad, weight_grad = ctx.grads
        if upstream != 1.0:
            if weight_grad is None:
                raise RuntimeError(f"the head's gradient is already in main_grad, but the loss is scaled by {upstream}")
            hidden_grad.mul_(upstream)
            weight_grad.mul_(upstream)
        head = None if weight_grad is None else weight_grad.to(hidden_grad.dtype)
        ctx.grads = None  # frees them, and a second backward pass fails
        return hidden_grad, head, None, None, None, None, None


def fused_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: LossTargets,
    objective: GkdObjective,
    *,
    scale: float,
    chunk_tokens: int,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of the trained tokens, with its gradient by hidden states and head.

    Args:
        hidden: [N, H] last hidden states that predict the trained tokens; fp64, fp32 or bf16.
        weight: [V, H] the lm_head, same type.
        targets: what to compare with.
        objective: which loss.
        scale: one over the trained tokens of the whole optimiser step.
        chunk_tokens: tokens whose logits exist at the same time.
        main_grad: [V, H] fp32; the head's gradient is added here at once and autograd gets none for it. Unset: autograd
            gets the head's gradient.

    Returns:
        The loss, Σ token losses × `scale`, and the sums over tokens of `TOKEN_METRICS` (not differentiable).
    """
    return _FusedHeadLoss.apply(hidden, weight, targets, objective, scale, chunk_tokens, main_grad)  # type: ignore[return-value]


@torch.no_grad()
def head_metrics(
    hidden: Tensor, weight: Tensor, targets: LossTargets, objective: GkdObjective, *, chunk_tokens: int
) -> Tensor:
    """Give the sums over tokens of `TOKEN_METRICS` without a gradient; arguments as in `fused_head_loss`."""
    sums = torch.zeros(len(TOKEN_METRICS), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        sums += _chunk_loss(hidden[rows], weight, targets.rows(rows), objective, 1.0, None)[0].sum(0)
    return sums
