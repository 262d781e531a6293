"""From a teacher's last hidden states to its top-K log-probabilities, exactly and in fp32.

Shapes: `N` positions, `H` hidden size, `V` the ids that count, `W` = V rounded up to whole blocks, `C` positions of one
chunk, `K` ids kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from opd.config import Dtype
from opd.device import HostProfile
from opd.matmul import fp32_precision

BLOCK = 32
"""Columns of which only the maximum is looked at first."""
CHUNK_BYTES = 2**25
"""fp32 logits that exist at once: large enough for fast matrix products, small enough for the caches."""
OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config fields of models whose logits are not `lm_head(hidden)`."""

TORCH_DTYPE: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Log-probabilities of N positions, on the CPU."""

    token_logprobs: torch.Tensor
    """[N] fp32, of the target itself."""
    ids: torch.Tensor
    """[N, K] int32, likeliest first."""
    logprobs: torch.Tensor
    """[N, K] fp32"""
    covered: torch.Tensor
    """[N] bool, whether the target is among the top K."""


class TeacherHead:
    """The lm_head of an HF folder, cut to the ids that count.

    Args:
        folder: Of the teacher.
        vocab_size: Ids that count; embedding rows beyond it are padding and get no probability.
        dtype: What the teacher computes in. The logits are fp32 in any case: bf16 logits lose up to 6 % of the loss.
        profile: Of this host.
    """

    def __init__(self, folder: Path, *, vocab_size: int, dtype: Dtype, profile: HostProfile) -> None:
        weight = _read_head(folder)
        if vocab_size > len(weight):
            raise ValueError(f"the teacher in {folder} has {len(weight)} ids, fewer than the {vocab_size} to be scored")
        self.vocab_size = vocab_size
        width = -(-vocab_size // BLOCK) * BLOCK
        bf16 = dtype == "bf16"
        self._mixed = bf16 and profile.bf16_products == "mixed"
        self._precision = "bf16" if bf16 and not self._mixed else "ieee"
        kept_as = torch.bfloat16 if self._mixed else torch.float32
        self._weight = torch.zeros(width, weight.shape[1], dtype=kept_as, device=profile.torch_device)
        self._weight[:vocab_size] = weight[:vocab_size].to(TORCH_DTYPE[dtype])
        self._chunk = max(1, CHUNK_BYTES // (4 * width))

    @torch.inference_mode()
    def top_k(self, hidden: torch.Tensor, targets: torch.Tensor, k: int) -> TopK:
        """Give the top K and the targets' own log-probabilities over the vocabulary.

        Args:
            hidden: [N, H] last hidden states, after the final norm.
            targets: [N] int64, the ids whose own value is wanted.
            k: At most `vocab_size`.
        """
        hidden = hidden.to(device=self._weight.device, dtype=self._weight.dtype)
        targets = targets.to(self._weight.device)
        with fp32_precision(self._precision):
            chunks = [
                self._top_k_of_chunk(h, t, k)
                for h, t in zip(hidden.split(self._chunk), targets.split(self._chunk), strict=True)
            ]
        own, ids, logprobs = (torch.cat(parts).cpu() for parts in zip(*chunks, strict=True))
        covered = (ids == targets.cpu()[:, None]).any(1)
        return TopK(token_logprobs=own, ids=ids.int(), logprobs=logprobs, covered=covered)

    def _top_k_of_chunk(self, hidden_CH: torch.Tensor, targets_C: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
        logits_CW = self._logits(hidden_CH)
        logits_CW[:, self.vocab_size :] = -torch.inf
        own_C1 = logits_CW.gather(1, targets_C[:, None])
        top_CK, ids_CK = _exact_top_k(logits_CW, k)
        largest_C1 = top_CK[:, :1].clone()
        # In place: the logits are not needed any more, and their memory traffic is what costs time here.
        log_z_C1 = logits_CW.sub_(largest_C1).exp_().sum(1, keepdim=True).log_().add_(largest_C1)
        if not log_z_C1.isfinite().all():
            raise FloatingPointError("the teacher's logits are not finite; check its weights and dtype")
        return (own_C1 - log_z_C1)[:, 0], ids_CK, top_CK - log_z_C1

    def _logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """[C, W] fp32."""
        if self._mixed:
            return torch.mm(hidden_CH, self._weight.T, out_dtype=torch.float32)
        return torch.mm(hidden_CH, self._weight.T)


def _exact_top_k(x_CW: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the k largest of each row and their columns, largest first.

    They lie in the k blocks with the largest maxima, so only those blocks are searched.
    """
    rows, width = x_CW.shape
    if k * BLOCK * 2 > width:
        return tuple(x_CW.topk(k, dim=1))  # type: ignore[return-value]
    blocks = x_CW.view(rows, width // BLOCK, BLOCK)
    block_ids_CK = blocks.amax(2).topk(k, dim=1, sorted=False).indices
    candidates = blocks.gather(1, block_ids_CK[:, :, None].expand(-1, -1, BLOCK)).view(rows, k * BLOCK)
    values_CK, places_CK = candidates.topk(k, dim=1)
    return values_CK, block_ids_CK.gather(1, places_CK // BLOCK) * BLOCK + places_CK % BLOCK


def _read_head(folder: Path) -> torch.Tensor:
    """Give the output projection [rows, H] of an HF folder, as it is stored."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    settings = config.to_dict()
    if other := [name for name in OTHER_LOGITS if settings.get(name)]:
        raise ValueError(
            f"the teacher in {folder} sets {', '.join(other)}, so that its logits are not a plain projection; "
            'use scoring="prompt_logprobs"'
        )
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", framework="pt") as stored:
            files = dict.fromkeys(stored.keys(), "model.safetensors")
    if "lm_head.bias" in files:
        raise ValueError(f'the teacher in {folder} has an lm_head bias; use scoring="prompt_logprobs"')
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    if name not in files:
        raise ValueError(f"the teacher in {folder} has no tensor {name}; is it a causal language model?")
    with safe_open(folder / files[name], framework="pt") as stored:
        return stored.get_tensor(name)
