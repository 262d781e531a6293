"""Which students the learner can train. Apart from the learner, so that a plan needs no Megatron to say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the configs that can be trained."""


def check_supported(config: PretrainedConfig) -> None:
    """Stop on a model that the learner cannot train exactly.

    Raises:
        ValueError: the family, or one of its variants, is not mapped.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"student.model has model_type {config.model_type!r}; the learner trains {', '.join(FAMILIES)} (dense)"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"student.model has hidden_act {config.hidden_act!r}; the learner knows silu")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("student.model uses sliding-window attention, which the learner does not compute")
    if getattr(config, "mlp_bias", False):
        raise ValueError("student.model has mlp_bias, which the learner does not map")
    if getattr(config, "attention_bias", False) and config.model_type != "qwen2":
        raise ValueError("student.model has attention_bias on the output projection, which the learner does not map")
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "linear", "llama3"):
        raise ValueError(f"student.model has rope_type {rope!r}; the learner knows default, linear and llama3")


def head_dim(config: PretrainedConfig) -> int:
    """Give the size of an attention head, which need not be hidden size / heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
