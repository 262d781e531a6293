"""The loop with rollouts: how old answers may be, that none is lost, and what waits for what. Fakes that sleep."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from opd.batches import answer_seed
from opd.config import (
    DataConfig,
    LearnerConfig,
    LoopConfig,
    RolloutConfig,
    RunConfig,
    StudentConfig,
    TeacherConfig,
    WeightSyncConfig,
)
from opd.data.on_policy import OnPolicySource
from opd.errors import LearnerLost, ParityError, RolloutError, ScoringError
from opd.loop import Outcome, Parts, train
from opd.types import LossStats, Prompt, RolloutTrace, Sample, SyncStats, TrainBatch
from tests.fakes import (
    ListSource,
    RecordingCheckpoints,
    RecordingLearner,
    RecordingObserver,
    Script,
    TableScorer,
    numbered_prompt,
    numbered_sample,
)
from tests.virtual_time import Stage, run_in_virtual_time

SAMPLES = 16
LENGTH = 4


def now() -> float:
    return asyncio.get_running_loop().time()


class SleepingStudents:
    """Rollout engines and weight sync in one: an answer's first token has the weights of when it was begun."""

    def __init__(self, learner: SleepingLearner, item_s: float, sync_s: float) -> None:
        self._learner, self._stage, self._sync_s = learner, Stage(item_s), sync_s
        self.version = -1
        self.asked: list[str] = []
        self.seeds: dict[str, int] = {}
        self.answered_at: dict[str, float] = {}
        self.fails_at: dict[str, Exception] = {}
        self.syncing = 0

    async def answer(self, prompt: Prompt, *, seed: int, temperature: float | None = None) -> Sample:
        assert self.version >= 0, "asked before the first sync"
        self.asked.append(prompt.sample_id)
        self.seeds[prompt.sample_id] = seed
        oldest = self.version
        await self._stage.work()
        if prompt.sample_id in self.fails_at:
            raise self.fails_at[prompt.sample_id]
        self.answered_at[prompt.sample_id] = now()
        versions = np.full(LENGTH, self.version, np.int32)
        versions[0] = oldest
        return prompt.answered(
            np.array([8, 9, 8, 1], np.int32),
            "stop",
            RolloutTrace(sampling_logprobs=np.full(LENGTH, -0.5, np.float32), weight_versions=versions),
        )

    async def sync(self, *, probe: bool) -> SyncStats:
        self.syncing += 1
        assert self.syncing == 1, "two syncs at a time"
        await asyncio.sleep(self._sync_s)
        self.version = len(self._learner.weights)
        self.syncing -= 1
        if (error := self.fails_at.get(f"sync {self.version}")) is not None:
            raise error
        return SyncStats(version=self.version, seconds=self._sync_s, bytes=8, gap_mean=None, gap_max=None)

    async def close(self) -> None: ...


class SleepingLearner(RecordingLearner):
    """Takes a fixed time for a batch."""

    def __init__(self, script: Script, batch_s: float) -> None:
        super().__init__(script)
        self._stage = Stage(batch_s)

    async def forward_backward(self, batch: TrainBatch) -> LossStats:
        await self._stage.work()
        return await super().forward_backward(batch)


class SleepingScorer(TableScorer):
    """Takes a fixed time for a sample."""

    def __init__(self, script: Script, item_s: float) -> None:
        super().__init__(script)
        self._stage = Stage(item_s)
        self.begun_at: dict[str, float] = {}

    async def score(self, samples: Sequence[Sample]) -> list[Sample]:
        self.begun_at |= {s.sample_id: now() for s in samples}
        await self._stage.work(len(samples))
        return await super().score(samples)


class Observer(RecordingObserver):
    """Also notes when a step was done."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.times: list[float] = []

    def step(self, report: Any) -> None:
        super().step(report)
        self.times.append(now())


@dataclass(frozen=True)
class Pace:
    """Seconds that a whole batch takes in each stage."""

    rollout: float = 4.0
    score: float = 2.0
    learn: float = 3.0
    sync: float = 0.0


class OnPolicyLoop:
    """A loop with rollouts that is ready to run."""

    def __init__(
        self,
        pace: Pace = Pace(),
        *,
        staleness: int = 0,
        every_steps: int = 1,
        steps: int = 12,
        fraction: float = 1.0,
        rows: int = 1000,
        heldout: int = 0,
    ) -> None:
        self.config = RunConfig(
            name="test",
            student=StudentConfig(model="student"),
            teachers=[TeacherConfig(model="teacher")],
            data=DataConfig(source="rows.jsonl", max_prompt_tokens=10, max_response_tokens=10),
            learner=LearnerConfig(max_tokens_per_microbatch=300),
            rollout=RolloutConfig(
                max_staleness=staleness, on_policy_fraction=fraction, max_new_tokens=10, heldout_answers=heldout
            ),
            weight_sync=WeightSyncConfig(every_steps=every_steps),
            run=LoopConfig(max_steps=steps, samples_per_step=SAMPLES, eval_every=0),
        )
        self.script = Script()
        made = numbered_prompt if fraction == 1 else numbered_sample
        source: Any = ListSource([made(i) for i in range(rows)])  # type: ignore[misc]
        self.source = OnPolicySource(source, fraction=fraction, samples_per_prompt=1, seed=0)
        self.learner = SleepingLearner(self.script, pace.learn)
        self.students = SleepingStudents(self.learner, pace.rollout / SAMPLES, pace.sync)
        self.scorer = SleepingScorer(self.script, pace.score / SAMPLES)
        self.observer = Observer(self.script)
        self.checkpoints = RecordingCheckpoints(self.script, self.learner)
        self.stop = asyncio.Event()
        self.others: set[asyncio.Task[Any] | None] = set()
        """Tasks that are not the loop's."""
        self._heldout = [numbered_prompt(900 + i) for i in range(heldout)]

    async def main(self) -> Outcome:
        parts = Parts(
            source=self.source,
            scorer=self.scorer,
            learner=self.learner,
            observer=self.observer,
            checkpoints=self.checkpoints,
            rollout=self.students,
            weight_sync=self.students,
        )
        try:
            return await train(self.config, parts, self._heldout, self.stop)
        finally:
            left = asyncio.all_tasks() - self.others - {asyncio.current_task()}
            assert not left, left

    def run(self, runner: Callable[[Coroutine[Any, Any, Outcome]], Outcome] = run_in_virtual_time) -> Outcome:
        return runner(self.main())

    def trained(self) -> list[str]:
        return [s.sample_id for report in self.observer.reports for s in report.scored.samples]

    def period(self) -> float:
        """Give the seconds of a step once the pipeline is full, and before it runs empty."""
        gaps = np.diff(self.observer.times)
        return statistics.median(gaps[2:-5])


@pytest.mark.parametrize(("staleness", "every_steps"), [(0, 1), (1, 1), (1, 2), (2, 3), (4, 1), (4, 2), (4, 5)])
@pytest.mark.parametrize("slowest", ["rollout", "score", "learn", "sync"])
def test_no_answer_is_older_than_the_bound_and_none_is_lost(staleness: int, every_steps: int, slowest: str) -> None:
    loop = OnPolicyLoop(replace(Pace(), **{slowest: 9.0}), staleness=staleness, every_steps=every_steps)
    outcome = loop.run()
    assert outcome.steps == 12
    seen = [age for report in loop.observer.reports for age in report.staleness]
    assert len(seen) == 12 * SAMPLES
    assert min(seen) >= 0
    assert max(seen) <= staleness
    if staleness == every_steps - 1:
        assert max(seen) == staleness, "the bound is used"
    assert loop.trained() == [f"s{i}" for i in range(12 * SAMPLES)], "in the order of the data, each once"
    assert loop.students.asked == loop.trained(), "what was begun was trained"
    assert outcome.synced == 12


def test_the_bound_is_used_to_the_full_where_answering_is_slowest() -> None:
    for staleness in (0, 1, 4):
        loop = OnPolicyLoop(Pace(rollout=9.0), staleness=staleness)
        loop.run()
        assert max(age for report in loop.observer.reports for age in report.staleness) == staleness


@pytest.mark.parametrize("staleness", [1, 4])
@pytest.mark.parametrize("slowest", ["rollout", "score", "learn"])
def test_a_step_takes_as_long_as_the_slowest_stage(staleness: int, slowest: str) -> None:
    pace = replace(Pace(rollout=6.0, score=6.0, learn=6.0), **{slowest: 16.0})
    loop = OnPolicyLoop(pace, staleness=staleness, steps=20)
    loop.run()
    assert loop.period() <= 1.1 * 16.0
    synchronous = OnPolicyLoop(pace, staleness=0, steps=20)
    synchronous.run()
    assert synchronous.period() >= 16.0 + 6.0, "without staleness at least learning comes after answering"


def test_the_drivers_own_work_does_not_show_in_real_time() -> None:
    loop = OnPolicyLoop(Pace(rollout=0.02, score=0.02, learn=0.06), staleness=1, steps=14)
    loop.run(asyncio.run)
    assert loop.period() <= 1.1 * 0.06


def test_an_answer_is_scored_when_it_is_finished() -> None:
    loop = OnPolicyLoop(Pace(rollout=16.0, score=1.6), steps=2)
    loop.run()
    for name, answered in loop.students.answered_at.items():
        assert loop.scorer.begun_at[name] == pytest.approx(answered)
    assert loop.observer.times[0] == pytest.approx(16.0 + 0.1 + 3.0), "one scoring after the last answer, then learning"


def test_without_staleness_every_answer_has_the_newest_weights() -> None:
    loop = OnPolicyLoop(staleness=0, steps=5)
    loop.run()
    for report in loop.observer.reports:
        versions = {int(v) for s in report.scored.samples if s.rollout for v in s.rollout.weight_versions}
        assert versions == {report.step - 1}


def test_seeds_depend_on_run_and_sample_only() -> None:
    loops = [OnPolicyLoop(staleness=staleness, steps=6) for staleness in (0, 4)]
    for loop in loops:
        loop.run()
    assert loops[0].students.seeds == loops[1].students.seeds
    seeds = loops[0].students.seeds
    assert len(set(seeds.values())) == len(seeds)
    assert seeds["s3"] == answer_seed(0, "s3") != answer_seed(1, "s3")


def test_a_mixed_batch_asks_for_its_share_only() -> None:
    loop = OnPolicyLoop(fraction=0.5, steps=6)
    loop.run()
    samples = [s for report in loop.observer.reports for s in report.scored.samples]
    assert [s.sample_id for s in samples] == [f"s{i}" for i in range(6 * SAMPLES)], "in the order of the data"
    own = {s.sample_id for s in samples if s.source == "rollout"}
    assert own == set(loop.students.asked)
    assert 0.3 < len(own) / len(samples) < 0.7
    assert all((s.rollout is not None) == (s.source == "rollout") for s in samples)
    assert [len(report.staleness) for report in loop.observer.reports] == [
        sum(s.source == "rollout" for s in report.scored.samples) for report in loop.observer.reports
    ]


def test_held_out_prompts_are_answered_with_the_weights_of_the_step() -> None:
    loop = OnPolicyLoop(staleness=1, every_steps=2, steps=3, heldout=2)
    outcome = loop.run()
    assert list(outcome.heldout) == [0, 3]
    for step, evaluation in outcome.heldout.items():
        assert evaluation.on_dataset is None, "the prompts have no answers"
        versions = {int(v) for s in evaluation.answers if s.rollout for v in s.rollout.weight_versions}
        assert versions == {step}


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("s40", RolloutError("engines were lost")),
        ("sync 3", ParityError("they differ")),
        ("score", ScoringError("ids differ")),
    ],
)
def test_an_error_anywhere_leaves_a_checkpoint_and_no_task(staleness: int, where: str, error: Exception) -> None:
    loop = OnPolicyLoop(staleness=staleness)
    if where == "score":

        async def fail() -> None:
            raise error

        loop.script.acts["score s40"] = fail
    else:
        loop.students.fails_at[where] = error
    with pytest.raises(type(error), match=str(error)):
        loop.run()
    done = len(loop.learner.weights)
    assert 0 < done < 12
    assert list(loop.checkpoints.saved) == [done]
    assert loop.checkpoints.saved[done][1] == {"index": SAMPLES * done, "drawn": SAMPLES * done}


def test_a_learner_lost_in_a_sync_is_not_asked_for_a_checkpoint() -> None:
    loop = OnPolicyLoop()
    loop.students.fails_at["sync 2"] = LearnerLost("learner rank 0", "sending its weights", "it died")
    with pytest.raises(LearnerLost, match="it died"):
        loop.run()
    assert loop.checkpoints.saved == {}


@pytest.mark.parametrize("at_s", [1.0, 5.0, 8.5, 20.0])
def test_a_stop_at_any_time_leaves_a_checkpoint_and_no_task(at_s: float) -> None:
    loop = OnPolicyLoop(Pace(sync=1.0), staleness=1)

    async def main() -> Outcome:
        loop.others.add(asyncio.current_task())
        run = asyncio.create_task(loop.main())
        await asyncio.sleep(at_s)
        loop.stop.set()
        return await run

    outcome = run_in_virtual_time(main())
    assert outcome.stopped
    assert list(loop.checkpoints.saved) == [outcome.steps]
