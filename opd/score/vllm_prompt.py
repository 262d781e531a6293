"""Scoring by vLLM's own `prompt_logprobs`: works for every model that vLLM serves, projects the prompt rows too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs

from opd.config import Dtype
from opd.device import HostProfile
from opd.matmul import set_fp32_precision
from opd.score.requests import ScoredTokens, ScoreRequest
from opd.score.vllm_engine import VllmEngine
from opd.types import TeacherScore


class HeadSettings:
    """What vLLM mixes into its workers, so that the lm_head can be set up where it lives."""

    model_runner: Any
    """Of the worker; only declared here, since vLLM refuses a mixin with an attribute that the worker has too."""

    def set_up_head(self, vocab_size: int, matmul_precision: str) -> None:
        """Cut the logits to the ids that count; let oneDNN round operands of the fp32 lm_head."""
        self.model_runner.model.logits_processor.org_vocab_size = vocab_size
        set_fp32_precision(matmul_precision)


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
        self._engine = VllmEngine(
            {
                **engine_args,
                "max_logprobs": top_k,
                "logprobs_mode": "raw_logprobs",
                "hf_overrides": {"head_dtype": "float32"},  # bf16 logits lose up to 6 % of the loss
                "worker_extension_cls": f"{HeadSettings.__module__}.{HeadSettings.__qualname__}",
            }
        )
        if vocab_size > self._engine.vocab_size:
            raise ValueError(
                f"the teacher in {engine_args['model']} has {self._engine.vocab_size} ids, fewer than the "
                f"{vocab_size} to be scored"
            )
        # The operands came from bf16, so rounding them to it again is exact.
        rounds = dtype == "bf16" and profile.bf16_products == "upcast"
        self._engine.call_workers("set_up_head", vocab_size, "bf16" if rounds else "ieee")
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
        outputs = self._engine.run(requests, self._sampling, RequestOutput)
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
