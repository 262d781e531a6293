"""The records that travel from the data to the learner.

    row ──► Prompt ──► Sample ──► Sample + TeacherScore ──► Microbatch ──► TrainBatch
       data/     rollout/    score/                  packing         learner/

A data set answer skips `rollout/`: its row becomes a Sample at once.

A record is never changed: a stage gives back a copy with its own part filled in. Everything long is a NumPy array of a
fixed dtype, so that Ray moves it without copying it.

Shapes: `P` prompt tokens, `R` response tokens, `K` teacher ids kept per position, `T` tokens of a packed microbatch,
`S` samples in it, `N` trained tokens in it.

Alignment: row `r` of every `[R]` array speaks about `response_ids[r]`. The student's logits that predict that token sit
at position `P-1+r` of its sequence, the teacher's at `P'-1+r` of its own. They are paired by `r`, never by position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
Source = Literal["dataset", "rollout"]


def _require(name: str, array: np.ndarray, dtype: type[np.generic], shape: tuple[int | None, ...]) -> None:
    """Stop on an array of the wrong dtype or shape; `None` in `shape` allows any size."""
    fits = array.ndim == len(shape) and all(w is None or w == s for w, s in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, expected {np.dtype(dtype)}{list(shape)}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherScore:
    """What the teacher thinks of every response token, at temperature 1."""

    token_logprobs: NDArray[np.float32]
    """[R] log-probability of the response token itself, whether or not it is among the top K."""
    topk_ids: NDArray[np.int32]
    """[R, K] the teacher's K likeliest ids, likeliest first, no id twice."""
    topk_logprobs: NDArray[np.float32]
    """[R, K] their log-probabilities over the whole vocabulary."""
    covered: NDArray[np.bool_]
    """[R] whether the response token is among the top K."""

    def __post_init__(self) -> None:
        length, k = self.topk_ids.shape
        _require("token_logprobs", self.token_logprobs, np.float32, (length,))
        _require("topk_ids", self.topk_ids, np.int32, (length, k))
        _require("topk_logprobs", self.topk_logprobs, np.float32, (length, k))
        _require("covered", self.covered, np.bool_, (length,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutTrace:
    """What is known of an answer's making, token by token."""

    sampling_logprobs: NDArray[np.float32]
    """[R] log-probability of each token under the weights that sampled it, at temperature 1, all ids allowed."""
    weight_versions: NDArray[np.int32]
    """[R] version of those weights: optimiser steps that they had behind them."""

    def __post_init__(self) -> None:
        _require("sampling_logprobs", self.sampling_logprobs, np.float32, (None,))
        _require("weight_versions", self.weight_versions, np.int32, (len(self.sampling_logprobs),))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """What the student is asked to answer."""

    sample_id: str
    """Becomes the sample's."""
    prompt_ids: NDArray[np.int32]
    """[P]"""
    teacher: str
    """Name of the teacher that will score the answer."""
    teacher_prompt_ids: NDArray[np.int32] | None = None
    """[P'] what the teacher is asked, where it differs from the student's prompt."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The data row, untouched."""

    def __post_init__(self) -> None:
        _require(f"{self.sample_id}: prompt_ids", self.prompt_ids, np.int32, (None,))
        if not len(self.prompt_ids):
            raise ValueError(f"{self.sample_id}: a prompt needs at least one token")

    @property
    def prompt(self) -> Prompt:
        """Itself: what is common to prompts and samples."""
        return self

    def answered(
        self,
        response_ids: NDArray[np.int32],
        finish_reason: FinishReason,
        rollout: RolloutTrace,
        *,
        trained: bool = True,
    ) -> Sample:
        """Give the sample of this prompt with the student's answer; `trained=False` masks all its tokens."""
        return Sample(
            sample_id=self.sample_id,
            prompt_ids=self.prompt_ids,
            response_ids=response_ids,
            loss_mask=np.full(len(response_ids), trained, dtype=np.bool_),
            finish_reason=finish_reason,
            source="rollout",
            teacher=self.teacher,
            teacher_prompt_ids=self.teacher_prompt_ids,
            rollout=rollout,
            meta=self.meta,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One prompt with one response: the only sample type, from the data set or from the student."""

    sample_id: str
    """Unique in a run; says where the row came from, as `train.jsonl:17`, and the epoch, as `train.jsonl:17#1`."""
    prompt_ids: NDArray[np.int32]
    """[P] what the student is asked."""
    response_ids: NDArray[np.int32]
    """[R] with the end token when the answer ended, without it when it was cut off."""
    loss_mask: NDArray[np.bool_]
    """[R] which response tokens are trained on."""
    finish_reason: FinishReason
    """`stop`: the answer ended; `length`: it was cut off."""
    source: Source
    teacher: str
    """Name of the teacher that scores this sample."""
    teacher_prompt_ids: NDArray[np.int32] | None = None
    """[P'] what the teacher is asked, where it differs from the student's prompt."""
    rollout: RolloutTrace | None = None
    """How the student wrote the answer; only, and always, where `source` is `rollout`."""
    score: TeacherScore | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The data row, untouched."""

    def __post_init__(self) -> None:
        _require(f"{self.sample_id}: prompt_ids", self.prompt_ids, np.int32, (None,))
        _require(f"{self.sample_id}: response_ids", self.response_ids, np.int32, (None,))
        _require(f"{self.sample_id}: loss_mask", self.loss_mask, np.bool_, (len(self.response_ids),))
        if not len(self.prompt_ids) or not len(self.response_ids):
            raise ValueError(f"{self.sample_id}: a sample needs at least one prompt and one response token")
        if (self.source == "rollout") != (self.rollout is not None):
            raise ValueError(f"{self.sample_id}: source is {self.source!r}, rollout is {self.rollout!r}")
        if self.rollout is not None and len(self.rollout.sampling_logprobs) != len(self.response_ids):
            raise ValueError(
                f"{self.sample_id}: {len(self.rollout.sampling_logprobs)} sampled tokens for {len(self.response_ids)}"
            )
        if self.score is not None and len(self.score.token_logprobs) != len(self.response_ids):
            raise ValueError(
                f"{self.sample_id}: {len(self.score.token_logprobs)} scored tokens for {len(self.response_ids)}"
            )

    @property
    def prompt(self) -> Prompt:
        """The question alone."""
        return Prompt(
            sample_id=self.sample_id,
            prompt_ids=self.prompt_ids,
            teacher=self.teacher,
            teacher_prompt_ids=self.teacher_prompt_ids,
            meta=self.meta,
        )

    def with_score(self, score: TeacherScore) -> Sample:
        """Give back this sample with the teacher's score."""
        return dataclasses.replace(self, score=score)

    @property
    def scored_prompt_ids(self) -> NDArray[np.int32]:
        """[P'] the prompt as the teacher sees it."""
        return self.prompt_ids if self.teacher_prompt_ids is None else self.teacher_prompt_ids

    @property
    def num_tokens(self) -> int:
        """P + R."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Samples laid end to end for one forward and backward pass; no padding."""

    input_ids: NDArray[np.int64]
    """[T]"""
    position_ids: NDArray[np.int64]
    """[T] each sample starts again at 0."""
    cu_seqlens: NDArray[np.int32]
    """[S+1] where each sample starts in T, and T at the end."""
    predict_positions: NDArray[np.int64]
    """[N] the position in T whose hidden state predicts each trained token."""
    target_ids: NDArray[np.int64]
    """[N] the trained tokens."""
    topk_ids: NDArray[np.int64]
    """[N, K]"""
    topk_logprobs: NDArray[np.float32]
    """[N, K]"""
    token_logprobs: NDArray[np.float32]
    """[N] the teacher's log-probability of the trained token."""
    from_dataset: NDArray[np.bool_]
    """[N] whether the trained token comes from a data set answer (the cross-entropy term counts only those)."""
    sampling_logprobs: NDArray[np.float32]
    """[N] the student's own log-probability when it sampled the token; NaN where `from_dataset`."""

    @property
    def num_trained_tokens(self) -> int:
        """N."""
        return len(self.target_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """One optimiser step, cut into microbatches for every data-parallel rank."""

    ranks: tuple[tuple[Microbatch, ...], ...]
    """[data_parallel][M] microbatches; M may differ between ranks."""
    trained_tokens: int
    """Σ N over all ranks and microbatches: what the loss is divided by, fixed before the first backward pass."""
    total_tokens: int
    """Σ T."""
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over trained tokens, which add up over microbatches and ranks; see `metrics.per_token`."""

    sums: Mapping[str, float]
    """Metric name → sum over trained tokens."""
    tokens: int

    def __add__(self, other: LossStats) -> LossStats:
        names = sorted(set(self.sums) | set(other.sums))
        sums = {n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in names}
        return LossStats(sums=sums, tokens=self.tokens + other.tokens)

    def means(self) -> dict[str, float]:
        """Metric name → mean per trained token; empty when there was none."""
        return {name: total / self.tokens for name, total in self.sums.items()} if self.tokens else {}


NO_LOSS = LossStats(sums={}, tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStats:
    """What one optimiser step did."""

    grad_norm: float
    """Before clipping."""
    lr: float
    memory_gib: float = 0.0
    """Peak memory of the rank that answers, or of the largest of several."""
    skipped: bool = False
    """True when the step had nothing to train on: the weights are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
    """What one weight sync did."""

    version: int
    """Optimiser steps behind the weights that the engines have now."""
    seconds: float
    bytes: int
    """Of one copy of the weights."""
    gap_mean: float | None = None
    """Nats between the engines' and the learner's log-probabilities of the probe's tokens; None: not compared."""
    gap_max: float | None = None
