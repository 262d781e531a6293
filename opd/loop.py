"""The training loop: source → scorer → pack → learner, with evaluation and checkpoints. Knows the seams only.

    ScoredBatches (a task)                          train()
      source.next_samples ─► scorer.score ─► pack ──queue──► forward_backward ─► optim_step ─► report
      waits for room in the queue                            waits for a scored batch

The queue holds `run.prefetch_steps` batches: the teacher scores coming steps while the learner learns. At 0 the two
take turns. Whatever ends the loop early (a signal, an error outside the learner) leaves a checkpoint of the last step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from opd.config import RunConfig
from opd.data.packing import pack
from opd.errors import CheckpointError, LearnerLost, StepAborted
from opd.protocols import Learner, SampleSource, Scorer
from opd.types import LossStats, OptimStats, Sample, TrainBatch

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class Observer(Protocol):
    """Hears what happens: screen, TensorBoard, files."""

    def step(self, report: StepReport) -> None:
        """One optimiser step is done."""
        ...

    def evaluation(self, step: int, heldout: LossStats) -> None:
        """The held-out rows were measured after `step` steps."""
        ...


class Checkpoints(Protocol):
    """Keeps the student."""

    async def save(self, step: int, heldout_kl: float | None, source_state: Mapping[str, Any]) -> None:
        """Write the student as it is after `step` steps, and where the data had come to.

        Raises:
            CheckpointError: it could not be written; older ones are as they were.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """What one step learns from."""

    samples: Sequence[Sample]
    batch: TrainBatch
    score_s: float
    """Seconds that the scorer took."""
    source_state: Mapping[str, Any]
    """Where the source stood after giving these samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step, for whoever watches."""

    step: int
    scored: ScoredBatch
    loss: LossStats
    optim: OptimStats
    learn_s: float
    """forward_backward and optim_step."""
    wait_learn_s: float
    """The learner waited for a scored batch."""
    wait_score_s: float
    """The scorer had nothing to do."""
    step_s: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How the loop ended."""

    steps: int = 0
    """Optimiser steps done."""
    stopped: bool = False
    """Ended by a signal."""
    saved_step: int = -1
    """Step of the newest checkpoint of this run; -1: none."""
    source_state: Mapping[str, Any] = field(default_factory=dict)
    """Where the source stood after the last step."""
    heldout: dict[int, LossStats] = field(default_factory=dict)
    """Steps done → held-out measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `run.py` put together."""

    source: SampleSource
    scorer: Scorer
    learner: Learner
    observer: Observer
    checkpoints: Checkpoints


class Stopped(Exception):
    """The stop event was set while something was waited for."""


class ScoredBatches:
    """Scores the samples of coming steps, `prefetch` of them ahead of the learner."""

    def __init__(self, config: RunConfig, source: SampleSource, scorer: Scorer) -> None:
        self._config, self._source, self._scorer = config, source, scorer
        self._ahead: asyncio.Queue[asyncio.Task[ScoredBatch | None]] = asyncio.Queue()
        self._last: asyncio.Task[ScoredBatch | None] | None = None
        self._started = 0

    async def next(self, last_step: int) -> ScoredBatch | None:
        """Give the next step's batch; None when the data has ended. Nothing is scored for steps after `last_step`."""
        wanted = self._config.run.prefetch_steps + 1
        while self._ahead.qsize() < wanted and self._started < last_step:
            self._started += 1
            self._last = asyncio.create_task(self._make(after=self._last))
            self._ahead.put_nowait(self._last)
        return await self._ahead.get_nowait()

    async def cancel(self) -> None:
        """End the scoring that is under way."""
        tasks = [self._ahead.get_nowait() for _ in range(self._ahead.qsize())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # whoever awaited a batch has its error already

    async def _make(self, after: asyncio.Task[ScoredBatch | None] | None) -> ScoredBatch | None:
        if after is not None:
            await after  # one after the other: the order of the data stays, and what ends one ends those that follow
        samples = await self._source.next_samples(self._config.run.samples_per_step)
        if not samples:
            return None
        source_state = self._source.state()
        started = time.perf_counter()
        samples = await self._scorer.score(samples)
        score_s = time.perf_counter() - started
        return ScoredBatch(
            samples=samples, batch=pack_for(self._config, samples), score_s=score_s, source_state=source_state
        )


def pack_for(config: RunConfig, samples: Sequence[Sample]) -> TrainBatch:
    """Pack scored samples as the learner's config asks."""
    learner = config.learner
    return pack(samples, data_parallel=learner.data_parallel, max_tokens=learner.max_tokens_per_microbatch)


async def train(config: RunConfig, parts: Parts, heldout: Sequence[Sample], stop: asyncio.Event) -> Outcome:
    """Run the loop to its end, or until `stop` is set.

    Args:
        config: the run's.
        parts: as started by `run.py`.
        heldout: rows never trained on, unscored; none: no evaluation.
        stop: set it to end after at most one more microbatch; a checkpoint is written in any case.

    Raises:
        LearnerLost: a rank died or hung; the checkpoints written before are what is left.
        Exception: anything else that ended the run, after a checkpoint of the last step was written.
    """
    outcome = Outcome()
    batches = ScoredBatches(config, parts.source, parts.scorer)
    try:
        try:
            await _train(config, parts, batches, heldout, outcome, stop)
        finally:
            await batches.cancel()
    except Stopped:
        outcome.stopped = True
        await _save(parts, outcome)
    except (LearnerLost, CheckpointError):
        raise
    except Exception:  # whatever it was, the learner is alive and its weights are worth keeping
        try:
            await _save(parts, outcome)
        except (CheckpointError, LearnerLost) as unsaved:  # what ended the run is what must be told
            log.error("no checkpoint of step %d: %s", outcome.steps, unsaved)
        raise
    return outcome


async def _train(
    config: RunConfig,
    parts: Parts,
    batches: ScoredBatches,
    heldout: Sequence[Sample],
    outcome: Outcome,
    stop: asyncio.Event,
) -> None:
    run = config.run
    measured = await until_stopped(_score_heldout(config, parts, heldout), stop)
    await _evaluate(parts, measured, outcome, stop)
    more = True
    while more:
        more = await _step(config, parts, batches, outcome, stop) and outcome.steps < run.max_steps
        evaluates = run.eval_every and outcome.steps % run.eval_every == 0
        saves = run.save_every and outcome.steps % run.save_every == 0
        if evaluates or saves or not more:  # a checkpoint is measured, so that the best one is known
            await _evaluate(parts, measured, outcome, stop)
        if saves or not more:
            await _save(parts, outcome)


async def _step(config: RunConfig, parts: Parts, batches: ScoredBatches, outcome: Outcome, stop: asyncio.Event) -> bool:
    """Do one optimiser step; False when there is no data left."""
    started = time.perf_counter()
    scored = await until_stopped(batches.next(config.run.max_steps), stop)
    if scored is None:
        log.info("the data ended after %d steps", outcome.steps)
        return False
    ready = time.perf_counter()
    loss = await until_stopped(parts.learner.forward_backward(scored.batch), stop, parts.learner)
    step = outcome.steps + 1
    if not all(math.isfinite(total) for total in loss.sums.values()):
        names = ", ".join(sorted(s.sample_id for s in scored.samples))
        raise FloatingPointError(f"step {step}: the loss is not finite; the weights are unchanged. Samples: {names}")
    optim = await parts.learner.optim_step()
    ended = time.perf_counter()
    outcome.steps = step
    outcome.source_state = scored.source_state
    if loss.tokens and loss.sums["loss/total"] == 0.0:
        log.warning("step %d: the loss is exactly 0; are student and teacher the same model?", step)
    parts.observer.step(
        StepReport(
            step=step,
            scored=scored,
            loss=loss,
            optim=optim,
            learn_s=ended - ready,
            wait_learn_s=ready - started,
            wait_score_s=max(0.0, ended - started - scored.score_s),
            step_s=ended - started,
        )
    )
    return True


async def _score_heldout(config: RunConfig, parts: Parts, heldout: Sequence[Sample]) -> TrainBatch | None:
    """Score the held-out rows, once: the teacher does not change."""
    return pack_for(config, await parts.scorer.score(heldout)) if heldout else None


async def _evaluate(parts: Parts, heldout: TrainBatch | None, outcome: Outcome, stop: asyncio.Event) -> None:
    if heldout is None or outcome.steps in outcome.heldout:
        return
    stats = await until_stopped(parts.learner.evaluate(heldout), stop, parts.learner)
    outcome.heldout[outcome.steps] = stats
    parts.observer.evaluation(outcome.steps, stats)


async def _save(parts: Parts, outcome: Outcome) -> None:
    """Write a checkpoint of the student as it is now, unless that was done."""
    if outcome.saved_step == outcome.steps:
        return
    stats = outcome.heldout.get(outcome.steps)
    forward_kl = stats.means().get("loss/forward_kl") if stats else None
    await parts.checkpoints.save(outcome.steps, forward_kl, outcome.source_state)
    outcome.saved_step = outcome.steps


async def until_stopped(call: Awaitable[Answer], stop: asyncio.Event, learner: Learner | None = None) -> Answer:
    """Wait for `call`, or for `stop`; then `learner`, if it is at work, is told to abort.

    Raises:
        Stopped: `stop` was set.
    """
    work = asyncio.ensure_future(call)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if learner is not None:
            await learner.abort()
            with contextlib.suppress(StepAborted):
                await work
        raise Stopped
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.gather(work, stopping, return_exceptions=True)  # so that nothing of it runs on
