"""One run from its plan to its end: starts the processes, wires the parts, ends everything whatever happens."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

from opd.batches import gather_or_cancel
from opd.checkpoint import CheckpointStore
from opd.cluster import num_hosts, ray_session
from opd.config import RolloutConfig
from opd.data.dataset import DatasetSource
from opd.data.graders import answer_summary
from opd.data.on_policy import OnPolicySource
from opd.learner.group import MegatronLearner
from opd.loop import Evaluation, Outcome, Parts, StepReport, Stopped, train, until_stopped
from opd.metrics import MetricsWriter, heldout_values, step_values, sync_values
from opd.parity import PARITY_TOLERANCE, parity_gaps, probe_prompts
from opd.plan import Plan
from opd.progress import Progress
from opd.rollout.pool import RolloutPool
from opd.rollout.ray_engine import student_pool
from opd.score.pool import ScorerPool
from opd.score.ray_engine import teacher_pool
from opd.turns import Turns
from opd.types import Sample, SyncStats
from opd.weight_sync.sync import LearnerToEngines, transport_kind

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
    progress.phase("starting the engines and the learner" if config.rollout else "starting the teacher and the learner")
    turns = Turns(shared_cores=not plan.host.has_gpus)
    (teacher,) = config.teachers
    scorer = teacher_pool(
        teacher,
        folder=plan.teacher_folders[teacher.name],
        top_k=config.objective.top_k,
        vocab_size=plan.vocab_size,
        longest=plan.longest_sequence,
        profile=plan.host,
        turns=turns,
    )
    rollout = None if config.rollout is None else _student_pool(plan, config.rollout, turns)
    learner: MegatronLearner | None = None
    try:
        starting_learner = MegatronLearner.start(
            model_folder=plan.student_folder,
            config=config.learner,
            objective=config.objective,
            total_steps=plan.num_steps,
            vocab_size=plan.vocab_size,
            profile=plan.host,
            turns=turns,
        )
        engines = [scorer.start()] + ([rollout.start()] if rollout else [])
        started = await until_stopped(gather_or_cancel(starting_learner, *engines), stop)
        learner = trained = cast("MegatronLearner", started[0])
        parts = Parts(
            source=_source(plan),
            scorer=scorer,
            learner=trained,
            observer=_Observer(plan, progress, metrics, scorer, rollout),
            checkpoints=_Checkpoints(plan, store, trained, progress),
            rollout=rollout,
            weight_sync=None if rollout is None else _weight_sync(plan, trained, rollout, turns),
            examine=partial(_examine, plan),
        )
        progress.phase("measuring the held-out rows")
        return await train(config, parts, plan.data.heldout, stop)
    finally:
        await scorer.close()
        if rollout is not None:
            await rollout.close()
        if learner is not None:
            await learner.close()


def _source(plan: Plan) -> DatasetSource | OnPolicySource:
    config = plan.config
    rows = DatasetSource(
        plan.data.train, seed=config.run.seed, shuffle=config.data.shuffle, max_epochs=config.run.max_epochs
    )
    if config.rollout is None:
        return rows
    return OnPolicySource(
        rows,
        fraction=config.rollout.on_policy_fraction,
        samples_per_prompt=config.rollout.samples_per_prompt,
        seed=config.run.seed,
    )


def _student_pool(plan: Plan, config: RolloutConfig, turns: Turns) -> RolloutPool:
    return student_pool(
        config,
        dtype=plan.config.learner.dtype,
        folder=plan.student_folder,
        vocab_size=plan.vocab_size,
        num_token_ids=min(plan.num_token_ids, plan.vocab_size),
        end_token_ids=sorted(plan.end_tokens.all),
        longest=plan.longest_sequence,
        profile=plan.host,
        seed=plan.config.run.seed,
        turns=turns,
    )


def _weight_sync(plan: Plan, learner: MegatronLearner, pool: RolloutPool, turns: Turns) -> LearnerToEngines:
    config = plan.config
    assert config.weight_sync is not None
    assert config.rollout is not None
    sync = LearnerToEngines(
        config.weight_sync,
        learner,
        pool,
        kind=transport_kind(config.weight_sync.transport, has_gpus=plan.host.has_gpus, num_hosts=num_hosts()),
        workers_per_engine=config.rollout.tensor_parallel,
        probe=partial(parity_gaps, learner, pool, probe_prompts(plan.data)),
        tolerance=config.weight_sync.parity_tolerance or PARITY_TOLERANCE[config.learner.dtype],
        turns=turns,
    )
    pool.on_started = sync.bring_up
    return sync


def _examine(plan: Plan, answers: Sequence[Sample]) -> Mapping[str, float]:
    """Judge the student's answers to held-out prompts."""
    texts = [str(plan.tokenizer.decode(a.response_ids.tolist(), skip_special_tokens=True)) for a in answers]
    grader = plan.grader
    grades = None if grader is None else [grader.grade(t, a) for t, a in zip(texts, answers, strict=True)]
    return answer_summary(answers, grades)


class _Observer:
    """Sends what happens to the screen, to TensorBoard and to the run folder."""

    def __init__(
        self, plan: Plan, progress: Progress, metrics: MetricsWriter, scorer: ScorerPool, rollout: RolloutPool | None
    ) -> None:
        self._plan, self._progress, self._metrics = plan, progress, metrics
        self._scorer, self._rollout = scorer, rollout
        self._last_samples: Sequence[Sample] = ()

    def step(self, report: StepReport) -> None:
        """One optimiser step is done."""
        values = step_values(report) | {
            "memory/learner_gib": report.optim.memory_gib,
            "memory/scorer_gib": self._scorer.counters().memory_gib,
            "sample/refused_rows": float(len(self._plan.data.refused.rows)),
        }
        if self._rollout is not None:
            values["memory/rollout_gib"] = self._rollout.counters().memory_gib
        self._metrics.write(report.step, values)
        self._progress.step(report)
        self._last_samples = report.scored.samples

    def first_sync(self, sync: SyncStats) -> None:
        """The engines have the starting weights."""
        self._metrics.write(0, sync_values(sync))
        self._progress.first_sync(sync)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The held-out rows were measured after `step` steps."""
        self._metrics.write(step, heldout_values(evaluation))
        self._progress.evaluation(step, evaluation)
        shown = (evaluation.answers or self._last_samples)[: self._plan.config.run.text_samples]
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
