"""Hugging Face names and layouts of weights, and Megatron's: one table, read in both directions.

Megatron keeps two things in its own layout. QKV is one matrix of groups, one group per KV head: the query heads that
share the KV head, then its key, then its value. Gate and up projection are one matrix, gate first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from opd.learner.model import HiddenStateModel, head_dim

_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Megatron's name within a layer → Hugging Face's, for tensors in the same layout."""

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def hf_names(name: str) -> tuple[str, ...]:
    """Give the Hugging Face tensors that Megatron's parameter `name` is made of."""
    if name in _TOP:
        return (_TOP[name],)
    prefix, _, rest = name.partition("layers.")
    if prefix != "decoder." or not rest:
        raise KeyError(f"no Hugging Face name for the parameter {name}")
    index, _, local = rest.partition(".")
    layer = f"model.layers.{index}."
    kind = local.rpartition(".")[2]
    if local.startswith("self_attention.linear_qkv."):
        return tuple(f"{layer}self_attn.{p}_proj.{kind}" for p in "qkv")
    if local == "mlp.linear_fc1.weight":
        return (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight")
    return (layer + _PLAIN[local],)


def join(parts: tuple[Tensor, ...], config: PretrainedConfig) -> Tensor:
    """Put Hugging Face tensors together as Megatron keeps them."""
    if len(parts) == 3:
        groups, width = config.num_key_value_heads, head_dim(config)
        # [groups, heads of the group × width, ...]
        shaped = [p.reshape(groups, -1, width, *p.shape[1:]) for p in parts]
        return torch.cat(shaped, dim=1).reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts) if len(parts) == 2 else parts[0]


def split(tensor: Tensor, names: tuple[str, ...], config: PretrainedConfig) -> tuple[Tensor, ...]:
    """Take a Megatron tensor apart into Hugging Face ones: the inverse of `join`."""
    if len(names) == 3:
        groups, width = config.num_key_value_heads, head_dim(config)
        per_group = config.num_attention_heads // groups
        shaped = tensor.reshape(groups, per_group + 2, width, *tensor.shape[1:])
        parts = shaped.split([per_group, 1, 1], dim=1)
        return tuple(p.reshape(-1, *tensor.shape[1:]) for p in parts)
    return tuple(tensor.chunk(2)) if len(names) == 2 else (tensor,)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"student.model {folder} has no .safetensors file; convert it with transformers first")
        self._files = [safe_open(f, framework="pt") for f in files]
        self._where = {name: f for f in self._files for name in f.keys()}  # noqa: SIM118 - not a mapping

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._where)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise ValueError(f"student.model lacks the tensor {name}; it has {len(self._where)} others")
        return self._where[name].get_tensor(name)


def load_hf(model: HiddenStateModel, config: PretrainedConfig, folder: Path) -> None:
    """Fill the model from a Hugging Face folder; every tensor must be used once and fit.

    Raises:
        ValueError: a tensor is missing, left over, or of another shape.
    """
    tensors = SafetensorsFolder(folder)
    used: set[str] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            names = hf_names(name)
            value = join(tuple(tensors[n] for n in names), config)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"student.model: {', '.join(names)} make {list(value.shape)}, the config asks for "
                    f"{list(parameter.shape)}"
                )
            parameter.copy_(value)
            used.update(names)
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    left = sorted(n for n in tensors.names - used - ignored if "rotary_emb.inv_freq" not in n)
    if left:
        raise ValueError(f"student.model has {len(left)} tensors that the learner does not know: {', '.join(left[:5])}")


def export_hf(
    weights: Mapping[str, Tensor], config: PretrainedConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Give the model's tensors under Hugging Face names, one parameter at a time.

    Args:
        weights: Megatron's name → tensor, which may be the fp32 master weights.
        config: the model's.
        dtype: of the tensors given back.
    """
    for name, tensor in weights.items():
        names = hf_names(name)
        for hf_name, part in zip(names, split(tensor.detach(), names, config), strict=True):
            yield hf_name, part.to(dtype).contiguous()
