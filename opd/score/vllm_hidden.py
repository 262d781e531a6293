"""Scoring by last hidden states: vLLM's pooling runner gives them, `TeacherHead` projects the response rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import PoolingParams, PoolingRequestOutput
from vllm.config import PoolerConfig

from opd.config import Dtype
from opd.device import HostProfile
from opd.score.head import TeacherHead
from opd.score.requests import ScoredTokens, ScoreRequest
from opd.types import TeacherScore
from opd.vllm_engine import VllmEngine


class HiddenStateScorer:
    """A vLLM engine without its lm_head, and the lm_head beside it.

    Args:
        engine_args: Of vLLM; its `model` is an HF folder.
        top_k: Ids kept per position.
        vocab_size: Ids that count; columns beyond it are padding.
        dtype: What the teacher computes in.
        profile: Of this host.
    """

    def __init__(
        self, engine_args: Mapping[str, Any], *, top_k: int, vocab_size: int, dtype: Dtype, profile: HostProfile
    ) -> None:
        self._top_k = top_k
        self._head = TeacherHead(Path(engine_args["model"]), vocab_size=vocab_size, dtype=dtype, profile=profile)
        pooler = PoolerConfig(task="token_embed", use_activation=False)
        self._engine = VllmEngine({**engine_args, "runner": "pooling", "convert": "embed", "pooler_config": pooler})
        self._params = PoolingParams(task="token_embed", use_activation=False)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        """Score sequences, in order."""
        outputs = self._engine.run([request.ids for request in requests], self._params, PoolingRequestOutput)
        hidden, targets = [], []
        for request, output in zip(requests, outputs, strict=True):
            states: torch.Tensor = output.outputs.data
            if len(states) != len(output.prompt_token_ids):
                raise RuntimeError(f"vLLM gave {len(states)} hidden states for {len(output.prompt_token_ids)} tokens")
            # The state at position P-1+r predicts response token r; the last one predicts what comes after it.
            hidden.append(states[request.first_response - 1 : -1])
            targets.append(torch.tensor(output.prompt_token_ids[request.first_response :]))
        top = self._head.top_k(torch.cat(hidden), torch.cat(targets), self._top_k)
        ends = np.cumsum([len(rows) for rows in targets])
        return [
            ScoredTokens(
                scored_ids=ids.numpy().astype(np.int32),
                score=TeacherScore(
                    token_logprobs=top.token_logprobs[end - len(ids) : end].numpy(),
                    topk_ids=top.ids[end - len(ids) : end].numpy(),
                    topk_logprobs=top.logprobs[end - len(ids) : end].numpy(),
                    covered=top.covered[end - len(ids) : end].numpy(),
                ),
            )
            for ids, end in zip(targets, ends.tolist(), strict=True)
        ]
