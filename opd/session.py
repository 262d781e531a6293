"""One run from its plan to its end: starts the processes, wires the parts, ends everything whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from opd.checkpoint import CheckpointStore
from opd.cluster import ray_session
from opd.data.dataset import DatasetSource
from opd.learner.group import MegatronLearner
from opd.loop import Outcome, Parts, StepReport, Stopped, train, until_stopped
from opd.metrics import MetricsWriter, heldout_values, step_values
from opd.plan import Plan
from opd.progress import Progress
from opd.score.pool import ScorerPool
from opd.score.ray_engine import teacher_pool
from opd.types import LossStats, Sample

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.jinja")
"""What a checkpoint takes over from the student's folder, besides generation_config.json."""


async def run(plan: Plan, folder: Path) -> Outcome:
    """Run a plan in its folder.

    Raises:
        WorkerLost, ScoringError, CheckpointError, FloatingPointError, OSError: what ended it early.
    """
    config = plan.config.model_copy(update={"name": folder.name})
    stop = asyncio.Event()
    with Progress(config, folder) as progress, MetricsWriter(folder) as metrics, _stopped_by_signals(stop):
        progress.header(train_rows=len(plan.data.train), heldout_rows=len(plan.data.heldout))
        for warning in plan.warnings:
            log.warning("%s", warning)
        if plan.data.refused.rows:
            log.warning("%s See %s", plan.data.refused.summary(), folder / "refused_rows.jsonl")
        progress.phase("starting Ray")
        store = CheckpointStore(folder / "checkpoints", config.run.keep_last, run_name=config.name)
        try:
            with ray_session(plan.host) as ray_logs:
                log.info("logs of the worker processes: %s", ray_logs)
                outcome = await _train(plan, progress, metrics, store, stop)
        except Stopped:  # before the loop began
            outcome = Outcome(stopped=True)
        except Exception as error:
            whole = store.list().whole
            with suppress(OSError):  # as a full disk, which must not hide what ended the run
                progress.failed(error, newest=whole[-1].folder if whole else None)
            raise
        newest = folder / "checkpoints" / f"step-{outcome.saved_step}" if outcome.saved_step >= 0 else None
        progress.summary(outcome, newest=newest, best=store.best())
    return outcome


async def _train(
    plan: Plan, progress: Progress, metrics: MetricsWriter, store: CheckpointStore, stop: asyncio.Event
) -> Outcome:
    config = plan.config
    progress.phase("starting the teacher engine and the learner")
    (teacher,) = config.teachers
    scorer = teacher_pool(
        teacher,
        folder=plan.teacher_folders[teacher.name],
        top_k=config.objective.top_k,
        vocab_size=plan.vocab_size,
        longest=plan.tokens.longest_sample,
        profile=plan.host,
    )
    learner: MegatronLearner | None = None
    try:
        starting_learner = MegatronLearner.start(
            model_folder=plan.student_folder,
            config=config.learner,
            objective=config.objective,
            total_steps=plan.num_steps,
            vocab_size=plan.vocab_size,
            profile=plan.host,
        )
        learner = await until_stopped(_both(scorer.start(), starting_learner), stop)
        source = DatasetSource(
            plan.data.train, seed=config.run.seed, shuffle=config.data.shuffle, max_epochs=config.run.max_epochs
        )
        parts = Parts(
            source=source,
            scorer=scorer,
            learner=learner,
            observer=_Observer(plan, progress, metrics, scorer),
            checkpoints=_Checkpoints(plan, store, learner, progress),
        )
        progress.phase("scoring and measuring the held-out rows")
        return await train(config, parts, plan.data.heldout, stop)
    finally:
        await scorer.close()
        if learner is not None:
            await learner.close()


async def _both(scorer: Coroutine[Any, Any, None], learner: Coroutine[Any, Any, MegatronLearner]) -> MegatronLearner:
    """Start both at once; the failure of one ends the start of the other, and is raised as it is."""
    starting = asyncio.ensure_future(scorer), asyncio.ensure_future(learner)
    try:
        return (await asyncio.gather(*starting))[1]
    finally:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)


class _Observer:
    """Sends what happens to the screen, to TensorBoard and to the run folder."""

    def __init__(self, plan: Plan, progress: Progress, metrics: MetricsWriter, scorer: ScorerPool) -> None:
        self._plan, self._progress, self._metrics, self._scorer = plan, progress, metrics, scorer
        self._last_samples: Sequence[Sample] = ()

    def step(self, report: StepReport) -> None:
        """One optimiser step is done."""
        values = step_values(report) | {
            "memory/learner_gib": report.optim.memory_gib,
            "memory/scorer_gib": self._scorer.counters().memory_gib,
            "sample/refused_rows": float(len(self._plan.data.refused.rows)),
        }
        self._metrics.write(report.step, values)
        self._progress.step(report)
        self._last_samples = report.scored.samples

    def evaluation(self, step: int, heldout: LossStats) -> None:
        """The held-out rows were measured after `step` steps."""
        self._metrics.write(step, heldout_values(heldout))
        self._progress.evaluation(step, heldout)
        shown = self._last_samples[: self._plan.config.run.text_samples]
        if shown:
            self._metrics.write_samples(step, shown, self._decode)

    def _decode(self, ids: list[int]) -> str:
        return str(self._plan.tokenizer.decode(ids, skip_special_tokens=False))


class _Checkpoints:
    """Writes the student with its tokenizer."""

    def __init__(self, plan: Plan, store: CheckpointStore, learner: MegatronLearner, progress: Progress) -> None:
        self._plan, self._store, self._learner, self._progress = plan, store, learner, progress

    async def save(self, step: int, heldout_kl: float | None, source_state: Mapping[str, Any]) -> None:
        """Write a checkpoint; see `loop.Checkpoints`."""
        folder = await self._store.save(
            step,
            self._write,
            heldout_kl=heldout_kl,
            state={"step": step, "source": dict(source_state)},
            needed_bytes=self._plan.estimates.checkpoint,
        )
        log.info("checkpoint %s", folder)

    async def _write(self, folder: Path) -> None:
        source = self._plan.student_folder
        for pattern in (*TOKENIZER_FILES, "generation_config.json"):
            for file in source.glob(pattern):
                shutil.copy(file, folder)
        await self._learner.export_hf(folder)


@contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`; a second one ends the process at once, and Ray's with it."""
    loop = asyncio.get_running_loop()
    asked = False

    def begin() -> None:
        log.warning("stopping: the last finished step is kept as a checkpoint; once more ends at once, without one")
        stop.set()

    # Not the loop's own handlers: these would wait while something else, as the start of Ray, keeps the loop.
    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True
        loop.call_soon_threadsafe(begin)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
