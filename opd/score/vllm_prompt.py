"""Scoring by vLLM's own `prompt_logprobs`: works for every model that vLLM serves, projects the prompt rows too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs

from opd.config import Dtype
from opd.device import HostProfile
from opd.score.requests import ScoredTokens, ScoreRequest
from opd.types import TeacherScore
from opd.vllm_engine import HEAD_ARGS, VllmEngine


class PromptLogprobScorer:
    """A vLLM engine that gives log-probabilities of its prompts.

    Args:
        engine_args: Of vLLM; `max_model_len` needs one position to spare.
        top_k: Ids kept per position.
        vocab_size: Ids that count; columns beyond it are padding.
        dtype: What the teacher computes in.
        profile: Of this host.
    """

    def __init__(
        self, engine_args: Mapping[str, Any], *, top_k: int, vocab_size: int, dtype: Dtype, profile: HostProfile
    ) -> None:
        self._top_k = top_k
        self._engine = VllmEngine({**engine_args, **HEAD_ARGS, "max_logprobs": top_k})
        self._engine.set_up_head(vocab_size, dtype=dtype, profile=profile)
        # Every value is given, whatever the model's generation_config.json says; one token has to be generated.
        self._sampling = SamplingParams(
            n=1,
            max_tokens=1,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            prompt_logprobs=top_k,
            flat_logprobs=True,
            detokenize=False,
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        """Score sequences, in order."""
        outputs = self._engine.run([request.ids for request in requests], self._sampling, RequestOutput)
        answers = []
        for request, output in zip(requests, outputs, strict=True):
            rows = output.prompt_logprobs
            assert isinstance(rows, FlatLogprobs), "flat_logprobs=True"
            answers.append(self._read(rows, request.first_response))
        return answers

    def _read(self, rows: FlatLogprobs, first_response: int) -> ScoredTokens:
        """Take the response's rows apart: each has the actual token first, then the top K by rank."""
        first, last = rows.start_indices[first_response], rows.end_indices[-1]
        shape = (len(rows) - first_response, self._top_k + 1)
        if last - first != shape[0] * shape[1]:
            raise RuntimeError(f"vLLM gave {last - first} log-probs for {shape[0]} tokens and top {self._top_k}")
        ids = np.array(rows.token_ids[first:last], np.int32).reshape(shape)
        logprobs = np.array(rows.logprobs[first:last], np.float32).reshape(shape)
        ranks = np.array(rows.ranks[first:last], np.int32).reshape(shape)
        if (ranks[:, 1:] != np.arange(1, shape[1])).any():
            raise RuntimeError("vLLM gave top log-probs that are not in the order of their ranks")
        topk_ids = np.ascontiguousarray(ids[:, 1:])
        return ScoredTokens(
            scored_ids=ids[:, 0].copy(),
            score=TeacherScore(
                token_logprobs=logprobs[:, 0].copy(),
                topk_ids=topk_ids,
                topk_logprobs=np.ascontiguousarray(logprobs[:, 1:]),
                covered=(topk_ids == ids[:, :1]).any(1),
            ),
        )
