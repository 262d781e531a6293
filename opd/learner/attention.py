"""Attention over packed samples: rotary embedding, then causal attention within each sample, never across samples.

Shapes: `T` tokens of a packed row, `L` of one sample, `D` of a head, `G` KV heads, `Q` query heads of one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from opd.matmul import fp32_precision

SCORE_MATRIX_TOKENS = 512
"""Up to here torch's own CPU kernel, whose backward pass works on small blocks, takes up to twice as long in bf16;
beyond it the matrices of scores would take too much memory."""


class _Rotate(torch.autograd.Function):
    """Rotary embedding of x [T, heads, D] by cos and sin [T, 1, D/2]; in two passes, where autograd's takes ten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Turn the pairs (x_i, x_{i+D/2}) by the angle, or back for `sign` -1."""
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (first, second), (out_first, out_second) = x.chunk(2, -1), rotated.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return rotated


@dataclass
class PackedSamples(PackedSeqParams):
    """Where the samples of a packed row begin, and the rotary angles of its tokens, made once for all layers."""

    lengths: tuple[int, ...] = ()
    cos: Tensor | None = None
    """[T, 1, D/2]"""
    sin: Tensor | None = None


class PackedAttention(torch.nn.Module):
    """Rotary embedding, then causal attention within each sample of a packed row, never across samples."""

    def __init__(self, config: TransformerConfig, layer_number: int, **kwargs: object) -> None:
        super().__init__()
        assert config.kv_channels is not None
        self.scale = config.softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, heads, head_dim].
            key: [T, KV heads, head_dim].
            value: as key.
            attention_mask: unused, the mask is causal.
            attn_mask_type: unused.
            attention_bias: unused.
            packed_seq_params: a `PackedSamples`.

        Returns:
            [T, heads × head_dim].
        """
        samples = packed_seq_params
        assert isinstance(samples, PackedSamples), "the learner always packs"
        query = _Rotate.apply(query, samples.cos, samples.sin)  # type: ignore[assignment]
        key = _Rotate.apply(key, samples.cos, samples.sin)  # type: ignore[assignment]
        parts = zip(*(x.split(samples.lengths) for x in (query, key, value)), strict=True)
        return torch.cat([_attend(q, k, v, self.scale) for q, k, v in parts]).flatten(1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one sample: query [L, G × Q, D], key and value [L, G, D]; gives [L, G × Q, D]."""
    if query.device.type == "cpu" and len(query) <= SCORE_MATRIX_TOKENS:
        return _ScoreMatrixAttention.apply(query, key, value, scale)  # type: ignore[return-value]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)


class _ScoreMatrixAttention(torch.autograd.Function):
    """Causal attention of one sample by whole matrices of scores; arguments as in `_attend`.

    Scores and their gradients are fp32 products of what may be bf16, as in flash attention; the probabilities are kept
    in the type of the inputs, [heads, L, L]. Query heads that share a KV head are rows of one matrix.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        length, groups = len(query), key.shape[1]
        q, k, v = _by_group(query, groups), key.transpose(0, 1), value.transpose(0, 1)
        future = torch.full((length, length), -torch.inf, device=query.device).triu_(1)
        with fp32_precision("ieee"):  # for a batch of small matrices faster than the bf16 units, which want them packed
            scores = torch.baddbmm(future.repeat(q.shape[1] // length, 1), q.float(), k.float().mT, alpha=scale)
        probs = torch.softmax(scores, -1, out=scores).to(query.dtype)  # [G, Q × L, L]
        attended = torch.bmm(probs, v)
        ctx.save_for_backward(q, k, v, probs, attended)
        ctx.scale = scale
        return _by_token(attended, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, probs, attended = ctx.saved_tensors
        length = k.shape[1]
        grad = _by_group(grads[0], len(k))
        grad_v = torch.bmm(probs.mT, grad)
        with fp32_precision("ieee"):
            scores = torch.bmm(grad.float(), v.float().mT)  # gradient by the probabilities, then by the scores
        scores.sub_((grad.float() * attended).sum(-1, keepdim=True)).mul_(probs).mul_(ctx.scale)
        by_scores = scores.to(q.dtype)
        grad_q, grad_k = torch.bmm(by_scores, k), torch.bmm(by_scores.mT, q)
        return _by_token(grad_q, length), grad_k.transpose(0, 1), grad_v.transpose(0, 1), None


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[L, G × Q, D] to [G, Q × L, D]."""
    length, heads, width = x.shape
    return x.view(length, groups, heads // groups, width).permute(1, 2, 0, 3).reshape(groups, -1, width)


def _by_token(x: Tensor, length: int) -> Tensor:
    """[G, Q × L, D] to [L, G × Q, D]."""
    groups, _, width = x.shape
    return x.view(groups, -1, length, width).permute(2, 0, 1, 3).reshape(length, -1, width)
