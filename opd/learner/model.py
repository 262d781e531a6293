"""A Hugging Face config as a Megatron `GPTModel` whose output is the last hidden state.

Dense decoders of the Llama, Qwen2 and Qwen3 families. The lm_head is kept out of the forward pass: `fused_loss.py`
applies it to the trained positions only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from opd.config import LearnerConfig
from opd.learner.attention import PackedAttention, PackedSamples
from opd.model_support import check_supported, head_dim

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class HiddenStateModel(GPTModel):
    """A `GPTModel` that gives back [T, 1, H] after the final norm, where GPTModel would go on to the logits."""

    rotary_frequencies: Tensor
    """[D/2] fp32, on the CPU."""

    def packed_samples(self, position_ids: Tensor, cu_seqlens: Tensor) -> PackedSamples:
        """Describe a packed row to the attention layers.

        Args:
            position_ids: [T], from 0 in each sample.
            cu_seqlens: [S+1] where each sample starts, and T.
        """
        lengths = cu_seqlens.diff().tolist()
        angles = torch.outer(position_ids.float(), self.rotary_frequencies.to(position_ids.device))[:, None]
        dtype = self.config.params_dtype
        return PackedSamples(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=tuple(lengths),
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
        )

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states

    @property
    def head_weight(self) -> torch.nn.Parameter:
        """[V, H] the lm_head, which is the embedding in a tied model."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer.weight if weight is None else weight  # type: ignore[return-value]


def transformer_config(config: PretrainedConfig, learner: LearnerConfig, *, on_cpu: bool) -> TransformerConfig:
    """Translate a Hugging Face config."""
    dtype = TORCH_DTYPES[learner.dtype]
    recompute: dict[str, Any] = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if learner.recompute
        else {}
    )
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        kv_channels=head_dim(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type == "qwen3",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,  # every weight is loaded
        calculate_per_token_loss=True,  # the loss is already divided by the tokens of the whole step
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Give Megatron's local layers with `PackedAttention` in them."""
    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def build_model(config: PretrainedConfig, learner: LearnerConfig, *, on_cpu: bool) -> HiddenStateModel:
    """Give the student without its weights; `torch.distributed` and Megatron's groups must be up.

    Raises:
        ValueError: see `check_supported`.
    """
    check_supported(config)
    megatron_config = transformer_config(config, learner, on_cpu=on_cpu)
    model = HiddenStateModel(
        config=megatron_config,
        transformer_layer_spec=layer_spec(megatron_config),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="none",  # PackedAttention rotates
    )
    model.rotary_frequencies = rotary_frequencies(config)
    return model


def rotary_frequencies(config: PretrainedConfig) -> Tensor:
    """Give the angle per position of each pair of dimensions [D/2], scaled as the config says."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config)
        return rope["rope_theta"] ** -exponents
    frequencies, attention_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    assert attention_scale == 1.0, rope["rope_type"]
    return frequencies
