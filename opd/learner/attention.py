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
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)[0].transpose(0, 1)
