"""Scoring by last hidden states: vLLM's pooling runner gives them, `TeacherHead` projects the response rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput, TokensPrompt
from vllm.config import PoolerConfig

from opd.config import Dtype
from opd.device import HostProfile
from opd.score.head import TeacherHead
from opd.score.requests import ScoredTokens, ScoreRequest
from opd.types import TeacherScore


class HiddenStateScorer:
    """A vLLM engine without its lm_head, and the lm_head beside it.

    Args:
        llm_kwargs: Of `vllm.LLM`; its `model` is an HF folder.
        top_k: Ids kept per position.
        vocab_size: Ids that count; columns beyond it are padding.
        dtype: What the teacher computes in.
        profile: Of this host.
    """

    def __init__(
        self, llm_kwargs: Mapping[str, Any], *, top_k: int, vocab_size: int, dtype: Dtype, profile: HostProfile
    ) -> None:
        self._top_k = top_k
        self._head = TeacherHead(Path(llm_kwargs["model"]), vocab_size=vocab_size, dtype=dtype, profile=profile)
        # Not vllm.LLM: for this task it insists on a tokenizer.
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                **llm_kwargs,
                runner="pooling",
                convert="embed",
                pooler_config=PoolerConfig(task="token_embed", use_activation=False),
            )
        )
        self._requests_sent = 0

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        """Score sequences, in order."""
        hidden, targets = [], []
        for request, output in zip(requests, self._encode(requests), strict=True):
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

    def _encode(self, requests: Sequence[ScoreRequest]) -> list[PoolingRequestOutput]:
        """Give the outputs with the hidden states, in order."""
        numbers = range(self._requests_sent, self._requests_sent + len(requests))
        self._requests_sent += len(requests)
        for number, request in zip(numbers, requests, strict=True):
            prompt = TokensPrompt(prompt_token_ids=request.ids.tolist())
            self._engine.add_request(str(number), prompt, PoolingParams(task="token_embed", use_activation=False))
        outputs: dict[str, PoolingRequestOutput] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, PoolingRequestOutput)
                if output.finished:
                    outputs[output.request_id] = output
        return [outputs[str(number)] for number in numbers]
