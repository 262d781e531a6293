"""What a vLLM model is made of, in Hugging Face terms: the tensors that a sync must bring, whole.

Read from its modules rather than its parameters: these hold one tensor-parallel rank's share, fused and perhaps packed
for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from opd.weight_sync.plan import REFUSAL, TensorSpec


def expected_tensors(model: nn.Module) -> list[TensorSpec]:
    """Give the tensors of a dense decoder (Llama, Qwen2, Qwen3) under their Hugging Face names.

    Args:
        model: As loaded by vLLM, at any tensor-parallel size.

    Raises:
        ValueError: It has a layer of a kind that cannot be updated here, or is quantised.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    specs: list[TensorSpec] = []
    tied = tied_heads(model)
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, LinearBase):
            if module.quant_config is not None:
                raise ValueError(
                    f"{REFUSAL} a rollout engine: {path} is quantised; rollout engines take plain weights only"
                )
            parent, _, own = path.rpartition(".")
            names = [f"{parent}.{name}" for name in packed[own]] if own in packed else [path]
            specs += _linear(module, names)
        elif isinstance(module, VocabParallelEmbedding):
            if module in tied:
                continue
            dtype = _name(module.params_dtype)
            specs.append(TensorSpec(f"{path}.weight", dtype, (module.org_vocab_size, module.embedding_dim)))
            if isinstance(module, ParallelLMHead) and module.has_bias:
                specs.append(TensorSpec(f"{path}.bias", dtype, (module.org_vocab_size,)))
        elif isinstance(module, RMSNorm):
            specs.append(TensorSpec(f"{path}.weight", _name(module.weight.dtype), tuple(module.weight.shape)))
        else:
            raise ValueError(
                f"{REFUSAL} a rollout engine: {path} is a {type(module).__name__}, a kind of layer that cannot be sent "
                "weights"
            )
    return specs


def tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    """Give the heads that share their weight with the embeddings."""
    modules = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {id(m.weight) for m in modules if not isinstance(m, ParallelLMHead)}
    return [m for m in modules if isinstance(m, ParallelLMHead) and id(m.weight) in embeddings]


def _linear(module: LinearBase, names: Sequence[str]) -> Iterator[TensorSpec]:
    if isinstance(module, QKVParallelLinear):
        heads, kv_heads = module.total_num_heads, module.total_num_kv_heads  # output_sizes count replicated KV heads
        sizes = [heads * module.head_size, kv_heads * module.head_size, kv_heads * module.v_head_size]
    elif isinstance(module, MergedColumnParallelLinear):
        sizes = module.output_sizes
    else:
        sizes = [module.output_size]
    dtype = _name(module.params_dtype)
    for name, size in zip(names, sizes, strict=True):
        yield TensorSpec(f"{name}.weight", dtype, (size, module.input_size))
        if module.has_bias:
            yield TensorSpec(f"{name}.bias", dtype, (size,))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
