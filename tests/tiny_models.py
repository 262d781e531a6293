"""Tiny random models in HF folders, for parity tests against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

Family = Literal["llama", "qwen2", "qwen3"]


def make_tiny(
    folder: Path,
    family: Family,
    *,
    tied: bool,
    vocab: int = 512,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
) -> Path:
    """Write a random causal language model (fp32, no tokenizer) into `folder` and give the folder.

    vLLM's CPU attention takes head sizes that are multiples of 32 only; hidden size is `heads * head_dim`.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        # Larger than usual, so that the distributions are far from uniform.
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        raise ValueError(f"family is {family!r}, not llama, qwen2 or qwen3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights and biases start at 1 and 0: random ones show when a conversion forgets them.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert parameter.dtype == torch.float32, name
    model.save_pretrained(folder)
    return folder
