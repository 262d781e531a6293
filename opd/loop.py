"""The training loop, on- and off-policy: batch → forward_backward → optim_step → sync. Knows the seams only.

    ScoredBatches (tasks, see batches.py)            train()
      source ─► rollout ─► scorer ─► pack ──queue──► forward_backward ─► optim_step ─► sync ─► report
                   ▲                                                                    │
                   └──────────────── engines have the weights of version v ◄────────────┘

Off-policy there is neither rollout nor sync, and nothing else differs. Whatever ends the loop early (a signal, an error
outside the learner) leaves a checkpoint of the last step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from opd.batches import ScoredBatch, ScoredBatches, answer_seed, gather_or_cancel, pack_for
from opd.config import RunConfig
from opd.errors import CheckpointError, LearnerLost, StepAborted
from opd.protocols import Learner, Rollout, SampleSource, Scorer, WeightSync
from opd.types import LossStats, OptimStats, Prompt, Sample, SyncStats, TrainBatch

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class Observer(Protocol):
    """Hears what happens: screen, TensorBoard, files."""

    def step(self, report: StepReport) -> None:
        """One optimiser step is done."""
        ...

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The held-out rows were measured after `step` steps."""
        ...

    def first_sync(self, sync: SyncStats) -> None:
        """The engines have the starting weights."""
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
class Evaluation:
    """The student on held-out rows."""

    on_dataset: LossStats | None = None
    """On the data set's answers."""
    on_own: LossStats | None = None
    """On the student's own answers, written for this evaluation."""
    answers: Sequence[Sample] = ()
    """Those."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """Metric name → what was found of them: accuracy, lengths."""

    @property
    def forward_kl(self) -> float | None:
        """What checkpoints are compared by: on the student's own answers where there are any."""
        stats = self.on_own or self.on_dataset
        return stats.means().get("loss/forward_kl") if stats else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step, for whoever watches."""

    step: int
    scored: ScoredBatch
    loss: LossStats
    optim: OptimStats
    sync: SyncStats | None
    """None when nothing was synced."""
    staleness: Sequence[int]
    """Of each answer of the student: steps between the oldest weights that wrote it and those that learned from it."""
    learn_s: float
    """forward_backward and optim_step."""
    wait_learn_s: float
    """The learner waited for a scored batch."""
    wait_score_s: float
    """The scorer had nothing to do."""
    wait_rollout_s: float
    """The rollout engines had nothing to do."""
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
    synced: int = 0
    """Version of the weights that the rollout engines have."""
    heldout: dict[int, Evaluation] = field(default_factory=dict)
    """Steps done → held-out measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What `session.py` put together."""

    source: SampleSource
    scorer: Scorer
    learner: Learner
    observer: Observer
    checkpoints: Checkpoints
    rollout: Rollout | None = None
    weight_sync: WeightSync | None = None
    """Where `rollout` is."""
    examine: Callable[[Sequence[Sample]], Mapping[str, float]] | None = None
    """Judges the student's answers to held-out prompts: metric name → number; where `rollout` is."""


class Stopped(Exception):
    """The stop event was set while something was waited for."""


async def train(config: RunConfig, parts: Parts, heldout: Sequence[Prompt | Sample], stop: asyncio.Event) -> Outcome:
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
    batches = ScoredBatches(config, parts.source, parts.scorer, parts.rollout)
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
    heldout: Sequence[Prompt | Sample],
    outcome: Outcome,
    stop: asyncio.Event,
) -> None:
    run = config.run
    if parts.weight_sync is not None:  # before the first answer: what the engines loaded may not be what is trained
        parts.observer.first_sync(await parts.weight_sync.sync(probe=True))
    heldout_batch = await until_stopped(_score_heldout(config, parts, heldout), stop)
    examiner = _Examiner(config, parts, heldout, heldout_batch)
    await examiner.evaluate(outcome, stop)
    more = True
    while more:
        more = await _step(config, parts, batches, outcome, stop) and outcome.steps < run.max_steps
        evaluates = run.eval_every and outcome.steps % run.eval_every == 0
        saves = run.save_every and outcome.steps % run.save_every == 0
        if evaluates or saves or not more:  # a checkpoint is measured, so that the best one is known
            await examiner.evaluate(outcome, stop)
        if saves or not more:
            await _save(parts, outcome)


async def _step(config: RunConfig, parts: Parts, batches: ScoredBatches, outcome: Outcome, stop: asyncio.Event) -> bool:
    """Do one optimiser step; False when there is no data left."""
    started = time.perf_counter()
    scored = await until_stopped(
        batches.next(version=_engine_version(parts, outcome), last_step=config.run.max_steps), stop
    )
    if scored is None:
        log.info("the data ended after %d steps", outcome.steps)
        return False
    ready = time.perf_counter()
    staleness = scored.staleness(version=outcome.steps)
    _check_staleness(config, scored, staleness)
    loss = await until_stopped(parts.learner.forward_backward(scored.batch), stop, parts.learner)
    step = outcome.steps + 1
    if not all(math.isfinite(total) for total in loss.sums.values()):
        names = ", ".join(sorted(s.sample_id for s in scored.samples))
        raise FloatingPointError(f"step {step}: the loss is not finite; the weights are unchanged. Samples: {names}")
    optim = await parts.learner.optim_step()
    learned = time.perf_counter()
    outcome.steps = step
    outcome.source_state = scored.source_state
    sync = await _sync(config, parts, outcome)  # not ended by a stop: it is short, and engines hold no half weights
    ended = time.perf_counter()
    if loss.tokens and loss.sums["loss/total"] == 0.0:
        log.warning("step %d: the loss is exactly 0; are student and teacher the same model?", step)
    parts.observer.step(
        StepReport(
            step=step,
            scored=scored,
            loss=loss,
            optim=optim,
            sync=sync,
            staleness=staleness,
            learn_s=learned - ready,
            wait_learn_s=ready - started,
            wait_score_s=max(0.0, ended - started - scored.score_s),
            wait_rollout_s=max(0.0, ended - started - scored.rollout_s) if parts.rollout else 0.0,
            step_s=ended - started,
        )
    )
    return True


def _engine_version(parts: Parts, outcome: Outcome) -> int:
    """Give the version of the weights that write answers; without engines nothing is written, and nothing stale."""
    return outcome.steps if parts.weight_sync is None else outcome.synced


def _check_staleness(config: RunConfig, scored: ScoredBatch, staleness: Sequence[int]) -> None:
    """Stop on an answer older than the bound, which pacing should make impossible."""
    if config.rollout is not None and max(staleness, default=0) > config.rollout.max_staleness:
        raise RuntimeError(
            f"an answer is {max(staleness)} steps old, rollout.max_staleness is {config.rollout.max_staleness}; this "
            f"is a bug. Samples: {', '.join(s.sample_id for s in scored.samples)}"
        )


async def _sync(config: RunConfig, parts: Parts, outcome: Outcome) -> SyncStats | None:
    """Bring the new weights to the engines, where that is due and somebody will use them."""
    settings, step = config.weight_sync, outcome.steps
    if parts.weight_sync is None or settings is None:
        return None
    last = step == config.run.max_steps
    if not last and step % settings.every_steps:
        return None
    probes = bool(settings.parity_every) and step % settings.parity_every == 0
    stats = await parts.weight_sync.sync(probe=probes or last)
    outcome.synced = stats.version
    return stats


async def _score_heldout(config: RunConfig, parts: Parts, heldout: Sequence[Prompt | Sample]) -> TrainBatch | None:
    """Score the data set's answers to held-out prompts, once: the teacher does not change."""
    answered = [row for row in heldout if isinstance(row, Sample)]
    return pack_for(config, await parts.scorer.score(answered)) if answered else None


@dataclass(frozen=True, slots=True)
class _Examiner:
    """Measures the student on held-out rows."""

    config: RunConfig
    parts: Parts
    heldout: Sequence[Prompt | Sample]
    batch: TrainBatch | None
    """The data set's answers to them, scored; None where it has none."""

    async def evaluate(self, outcome: Outcome, stop: asyncio.Event) -> None:
        """Measure the student as it is now, unless that was done."""
        if not self.heldout or outcome.steps in outcome.heldout:
            return
        on_dataset = await self._loss(self.batch, stop)
        answers = await until_stopped(self._answers(outcome), stop)
        own = pack_for(self.config, answers) if answers else None
        on_own = await self._loss(own, stop)
        examine = self.parts.examine
        summary = examine(answers) if examine and answers else {}
        evaluation = Evaluation(on_dataset=on_dataset, on_own=on_own, answers=answers, summary=summary)
        outcome.heldout[outcome.steps] = evaluation
        self.parts.observer.evaluation(outcome.steps, evaluation)

    async def _loss(self, batch: TrainBatch | None, stop: asyncio.Event) -> LossStats | None:
        if batch is None:
            return None
        return await until_stopped(self.parts.learner.evaluate(batch), stop, self.parts.learner)

    async def _answers(self, outcome: Outcome) -> Sequence[Sample]:
        """Give held-out prompts with the student's answers, scored."""
        rollout, settings = self.parts.rollout, self.config.rollout
        if rollout is None or settings is None or not settings.heldout_answers:
            return ()
        if outcome.synced != outcome.steps:  # what is measured is the student of this step
            assert self.parts.weight_sync is not None
            outcome.synced = (await self.parts.weight_sync.sync(probe=False)).version
        calls = [
            rollout.answer(
                sample.prompt,
                seed=answer_seed(self.config.run.seed, sample.sample_id),
                temperature=settings.heldout_temperature,
            )
            for sample in self.heldout[: settings.heldout_answers]
        ]
        return await self.parts.scorer.score(await gather_or_cancel(*calls))


async def _save(parts: Parts, outcome: Outcome) -> None:
    """Write a checkpoint of the student as it is now, unless that was done."""
    if outcome.saved_step == outcome.steps:
        return
    evaluation = outcome.heldout.get(outcome.steps)
    forward_kl = evaluation.forward_kl if evaluation else None
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
