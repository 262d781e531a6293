"""Batches of coming steps, made while the learner learns: samples taken, answered, scored and packed.

    source ─► prompt ─► rollout.answer ─┐
           └► data set sample ──────────┴► scorer.score ─► pack        one task per batch, one per answer within it

Paced by what is begun, never by throwing away: batch `b` is begun once the engines have weights that at most
`rollout.max_staleness` steps separate from those that will learn from it. An answer is scored when it is finished.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from opd.config import RunConfig
from opd.data.packing import pack
from opd.protocols import Rollout, SampleSource, Scorer
from opd.types import Prompt, Sample, TrainBatch

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """What one step learns from."""

    samples: Sequence[Sample]
    batch: TrainBatch
    rollout_s: float
    """Seconds from asking for the batch's answers to having the last; 0 where the data set has them all."""
    score_s: float
    """Seconds from the first sample that was given to the scorer to the last that came back."""
    source_state: Mapping[str, Any]
    """Where the source stood after giving these samples."""

    def staleness(self, version: int) -> list[int]:
        """Give for each answer of the student how many optimiser steps its oldest token lags behind `version`."""
        return [version - int(s.rollout.weight_versions.min()) for s in self.samples if s.rollout is not None]


@dataclass(slots=True)
class _Clock:
    """First start and last end of several overlapping calls."""

    started: float = field(default=float("inf"))
    ended: float = field(default=float("-inf"))

    async def time(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        self.started = min(self.started, time.perf_counter())
        answer = await call
        self.ended = time.perf_counter()
        return answer

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.started)


class ScoredBatches:
    """Makes the batches of coming steps."""

    def __init__(self, config: RunConfig, source: SampleSource, scorer: Scorer, rollout: Rollout | None = None) -> None:
        self._config, self._source, self._scorer, self._rollout = config, source, scorer, rollout
        self._begun: asyncio.Queue[asyncio.Task[ScoredBatch | None]] = asyncio.Queue()
        self._num_begun = 0
        self._in_order = asyncio.Lock()  # fair: batches take their samples in the order in which they were begun

    async def next(self, *, version: int, last_step: int) -> ScoredBatch | None:
        """Give the next step's batch; None when the data has ended.

        Args:
            version: of the weights that the rollout engines have; without engines, the steps done.
            last_step: nothing is made for steps after it.
        """
        run, rollout = self._config.run, self._config.rollout
        ahead = run.prefetch_steps if rollout is None else rollout.max_staleness
        while self._num_begun < min(last_step, version + 1 + ahead):
            self._num_begun += 1
            self._begun.put_nowait(asyncio.create_task(self._make()))
        return await self._begun.get_nowait()

    async def cancel(self) -> None:
        """End what is under way."""
        tasks = [self._begun.get_nowait() for _ in range(self._begun.qsize())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # whoever awaited a batch has its error already

    async def _make(self) -> ScoredBatch | None:
        async with self._in_order:
            taken = await self._source.next_samples(self._config.run.samples_per_step)
            source_state = self._source.state()
        if not taken:
            return None
        answering, scoring = _Clock(), _Clock()
        ready = [item for item in taken if isinstance(item, Sample)]

        async def answer_and_score(prompt: Prompt) -> Sample:
            assert self._rollout is not None, f"{prompt.sample_id} has no answer, and there is no rollout engine"
            seed = answer_seed(self._config.run.seed, prompt.sample_id)
            sample = await answering.time(self._rollout.answer(prompt, seed=seed))
            return (await scoring.time(self._scorer.score([sample])))[0]

        async def score_ready() -> list[Sample]:
            return await scoring.time(self._scorer.score(ready)) if ready else []

        answers = [answer_and_score(item) for item in taken if isinstance(item, Prompt)]
        of_data_set, *of_student = await gather_or_cancel(score_ready(), *answers)
        scored = {sample.sample_id: sample for sample in (*of_data_set, *of_student)}
        samples = [scored[item.sample_id] for item in taken]
        return ScoredBatch(
            samples=samples,
            batch=pack_for(self._config, samples),
            rollout_s=answering.seconds,
            score_s=scoring.seconds,
            source_state=source_state,
        )


def pack_for(config: RunConfig, samples: Sequence[Sample]) -> TrainBatch:
    """Pack scored samples as the learner's config asks."""
    learner = config.learner
    return pack(samples, data_parallel=learner.data_parallel, max_tokens=learner.max_tokens_per_microbatch)


def answer_seed(run_seed: int, sample_id: str) -> int:
    """Give the sampling seed of an answer: the same on every engine and after a resume, another for every sample."""
    digest = hashlib.blake2b(f"{run_seed} {sample_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


async def gather_or_cancel(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Give the answers of all calls, in order; the first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
