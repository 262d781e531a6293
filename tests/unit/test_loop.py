"""The loop with hand-written fakes: the order of things, and what is left when it ends early."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import pytest

from opd.batches import ScoredBatches
from opd.config import DataConfig, LearnerConfig, LoopConfig, RunConfig, StudentConfig, TeacherConfig
from opd.errors import CheckpointError, LearnerLost, ScoringError, WorkerLost
from opd.loop import Outcome, Parts, train
from tests.fakes import (
    ListSource,
    RecordingCheckpoints,
    RecordingLearner,
    RecordingObserver,
    Script,
    TableScorer,
    numbered_sample,
)

HELDOUT = [numbered_sample(90), numbered_sample(91)]


class Loop:
    """A loop that is ready to run, with everything a test wants to look at afterwards."""

    def __init__(self, *, rows: int = 100, heldout: bool = True, data_parallel: int = 1, **run: int) -> None:
        self.config = RunConfig(
            name="test",
            student=StudentConfig(model="student"),
            teachers=[TeacherConfig(model="teacher")],
            data=DataConfig(source="rows.jsonl", max_prompt_tokens=10, max_response_tokens=10),
            learner=LearnerConfig(max_tokens_per_microbatch=20, data_parallel=data_parallel),
            run=LoopConfig.model_validate({"samples_per_step": 2, "eval_every": 0, **run}),
        )
        self.script = Script()
        self.source = ListSource([numbered_sample(i) for i in range(rows)])
        self.learner = RecordingLearner(self.script)
        self.observer = RecordingObserver(self.script)
        self.checkpoints = RecordingCheckpoints(self.script, self.learner)
        self.stop = asyncio.Event()
        self._heldout = HELDOUT if heldout else []

    @property
    def events(self) -> list[str]:
        return self.script.events

    def at(self, event: str, act: Callable[[], Awaitable[None]]) -> None:
        self.script.acts[event] = act

    def fails_at(self, event: str, error: Exception) -> None:
        async def fail() -> None:
            raise error

        self.at(event, fail)

    def stops_at(self, event: str) -> None:
        """Set `stop` at an event, and let that work go on for as long as nobody ends it."""

        async def set_stop() -> None:
            self.stop.set()
            await asyncio.sleep(30)

        self.at(event, set_stop)

    def run(self) -> Outcome:
        """Run it to its end, however it ends, and see that it leaves no task."""

        async def main() -> Outcome:
            parts = Parts(
                source=self.source,
                scorer=TableScorer(self.script),
                learner=self.learner,
                observer=self.observer,
                checkpoints=self.checkpoints,
            )
            try:
                return await asyncio.wait_for(train(self.config, parts, self._heldout, self.stop), 5)
            finally:
                left = asyncio.all_tasks() - {asyncio.current_task()}
                assert not left, left

        return asyncio.run(main())

    def seen(self, *kinds: str) -> list[str]:
        """Give the events of some kinds, in order."""
        return [event for event in self.events if event.split()[0] in kinds]


def test_without_prefetch_scorer_and_learner_take_turns() -> None:
    loop = Loop(max_steps=2, prefetch_steps=0)
    outcome = loop.run()
    assert loop.events == [
        *("score s90+s91", "scored s90+s91", "evaluate 0", "heldout 0"),
        *("score s0+s1", "scored s0+s1", "learn s0+s1", "learned s0+s1", "optim 1", "step 1"),
        *("score s2+s3", "scored s2+s3", "learn s2+s3", "learned s2+s3", "optim 2", "step 2"),
        *("evaluate 2", "heldout 2", "save 2"),
    ]
    assert (outcome.steps, outcome.stopped, outcome.saved_step) == (2, False, 2)


def test_prefetch_scores_coming_steps_while_the_learner_learns() -> None:
    loop = Loop(max_steps=5, prefetch_steps=2)
    scored_meanwhile: list[str] = []

    async def learn_slowly() -> None:
        await asyncio.sleep(0.05)
        scored_meanwhile.extend(loop.seen("scored"))

    loop.at("learn s0+s1", learn_slowly)
    loop.run()
    assert scored_meanwhile == [f"scored {names}" for names in ("s90+s91", "s0+s1", "s2+s3", "s4+s5")]


def test_prefetch_changes_nothing_that_is_trained() -> None:
    loops = [Loop(max_steps=7, rows=13, eval_every=3, save_every=2, prefetch_steps=ahead) for ahead in (0, 1, 2, 9)]
    for loop in loops:
        loop.run()
    kinds = ("learn", "optim", "step", "evaluate", "save")
    assert len({str(loop.seen(*kinds)) for loop in loops}) == 1
    assert len({str(loop.seen("score")) for loop in loops}) == 1, "the order of the data"
    assert len({str(loop.checkpoints.saved) for loop in loops}) == 1
    assert [str(r.scored.source_state) for r in loops[0].observer.reports] == [
        str(r.scored.source_state) for r in loops[3].observer.reports
    ]


def test_nothing_is_scored_for_steps_after_the_last() -> None:
    loop = Loop(max_steps=2, prefetch_steps=5)
    loop.run()
    assert loop.seen("score") == ["score s90+s91", "score s0+s1", "score s2+s3"]


@pytest.mark.parametrize("prefetch_steps", [0, 2])
def test_the_data_may_end_before_the_steps_do(prefetch_steps: int) -> None:
    loop = Loop(max_steps=9, rows=5, prefetch_steps=prefetch_steps)
    outcome = loop.run()
    assert loop.learner.weights == ["s0+s1", "s2+s3", "s4"], "the last batch is smaller"
    assert (outcome.steps, outcome.stopped, outcome.saved_step) == (3, False, 3)
    assert loop.seen("evaluate", "save") == ["evaluate 0", "evaluate 3", "save 3"]
    assert loop.checkpoints.saved[3] == (0.5, {"index": 5}, ["s0+s1", "s2+s3", "s4"])


def test_a_last_batch_smaller_than_the_ranks_leaves_one_without_work() -> None:
    loop = Loop(max_steps=9, rows=3, data_parallel=2)
    loop.run()
    assert loop.learner.weights == ["s0+s1", "s2"]
    assert [len(rank) for rank in loop.observer.reports[-1].scored.batch.ranks] == [1, 0]


@pytest.mark.parametrize(
    ("eval_every", "save_every", "evaluated", "saved"),
    [
        (0, 0, [0, 6], [6]),
        (2, 0, [0, 2, 4, 6], [6]),
        (4, 0, [0, 4, 6], [6]),
        (0, 4, [0, 4, 6], [4, 6]),  # a checkpoint is measured
        (3, 2, [0, 2, 3, 4, 6], [2, 4, 6]),
        (6, 6, [0, 6], [6]),
        (1, 1, [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_when_it_evaluates_and_saves(eval_every: int, save_every: int, evaluated: list[int], saved: list[int]) -> None:
    loop = Loop(max_steps=6, eval_every=eval_every, save_every=save_every)
    outcome = loop.run()
    assert loop.seen("evaluate") == [f"evaluate {step}" for step in evaluated]
    assert loop.seen("heldout") == [f"heldout {step}" for step in evaluated]
    assert list(outcome.heldout) == evaluated
    assert list(loop.checkpoints.saved) == saved
    for step, (heldout_kl, source_state, weights) in loop.checkpoints.saved.items():
        assert heldout_kl == 0.5
        assert source_state == {"index": 2 * step}, "where this step's data ended, not what was taken ahead"
        assert len(weights) == step


def test_without_heldout_rows_nothing_is_evaluated() -> None:
    loop = Loop(max_steps=2, heldout=False, eval_every=1)
    loop.run()
    assert loop.seen("evaluate", "heldout") == []
    assert loop.seen("score") == ["score s0+s1", "score s2+s3"]
    assert loop.checkpoints.saved[2][0] is None


def test_a_step_reports_what_it_was() -> None:
    loop = Loop(max_steps=1)
    loop.run()
    (report,) = loop.observer.reports
    assert [s.sample_id for s in report.scored.samples] == ["s0", "s1"]
    assert all(s.score is not None for s in report.scored.samples)
    assert report.loss.means()["loss/total"] == 1.0
    assert report.optim.lr == 0.1
    assert 0 < report.learn_s + report.wait_learn_s <= report.step_s + 1e-9


# Ended early: a signal


@pytest.mark.parametrize("prefetch_steps", [0, 2])
@pytest.mark.parametrize(
    ("event", "step"),
    [
        ("score s90+s91", 0),
        ("evaluate 0", 0),
        ("score s0+s1", 0),
        ("learn s0+s1", 0),
        ("score s4+s5", 2),
        ("learn s4+s5", 2),
        ("evaluate 3", 3),
    ],
)
def test_a_stop_saves_the_last_finished_step_once(event: str, step: int, prefetch_steps: int) -> None:
    loop = Loop(max_steps=9, eval_every=3, prefetch_steps=prefetch_steps)
    loop.stops_at(event)
    outcome = loop.run()
    if prefetch_steps and event == "score s4+s5":
        step = outcome.steps  # it is scored ahead, while the learner is at an earlier step
        assert step < 2
    assert (outcome.steps, outcome.stopped, outcome.saved_step) == (step, True, step)
    assert loop.seen("save") == [f"save {step}"]
    assert loop.events[-1] == f"save {step}"
    assert loop.checkpoints.saved[step][2] == ["s0+s1", "s2+s3", "s4+s5"][:step], "the unfinished step is dropped"
    if event.split()[0] in ("learn", "evaluate"):
        assert loop.seen("abort") == ["abort"]


def test_a_stop_set_before_the_start_learns_nothing() -> None:
    loop = Loop(max_steps=9)
    loop.stop.set()
    outcome = loop.run()
    assert (outcome.steps, outcome.stopped, outcome.saved_step) == (0, True, 0)
    assert loop.seen("learned", "optim", "save") == ["save 0"]


def test_a_stop_in_the_optimizer_step_or_in_a_checkpoint_lets_it_finish() -> None:
    for event, step in (("optim 2", 2), ("save 2", 2)):
        loop = Loop(max_steps=9, save_every=2)

        async def set_stop(loop: Loop = loop) -> None:
            loop.stop.set()

        loop.at(event, set_stop)
        outcome = loop.run()
        assert (outcome.stopped, outcome.saved_step) == (True, step)
        assert loop.seen("step", "save") == ["step 1", "step 2", "save 2"]


def test_a_stop_when_the_last_step_is_saved_changes_nothing() -> None:
    loop = Loop(max_steps=2)

    async def set_stop() -> None:
        loop.stop.set()

    loop.at("save 2", set_stop)
    assert not loop.run().stopped


# Ended early: an error


def test_a_lost_learner_leaves_the_checkpoints_there_are() -> None:
    loop = Loop(max_steps=9, save_every=2)
    loop.fails_at("learn s6+s7", LearnerLost("learner rank 0", "learning", "it was killed"))
    with pytest.raises(LearnerLost, match="learner rank 0 was lost while learning: it was killed"):
        loop.run()
    assert loop.seen("save") == ["save 2"]


def test_a_learner_that_is_lost_while_it_is_told_to_stop_is_an_error() -> None:
    loop = Loop(max_steps=9)
    loop.stops_at("learn s2+s3")
    loop.fails_at("abort", LearnerLost("learner rank 0", "being told to stop", "it was killed"))
    with pytest.raises(LearnerLost):
        loop.run()
    assert loop.seen("save") == []


@pytest.mark.parametrize("prefetch_steps", [0, 1])
def test_a_scorer_error_saves_the_last_step(prefetch_steps: int) -> None:
    loop = Loop(max_steps=9, prefetch_steps=prefetch_steps)
    loop.fails_at("score s4+s5", ScoringError("teacher teacher: lost after 3 restarts"))
    with pytest.raises(ScoringError, match="lost after 3 restarts"):
        loop.run()
    assert loop.seen("step", "save") == ["step 1", "step 2", "save 2"], "what was scored before it is still learned"


def test_a_scorer_error_in_the_heldout_rows_comes_before_the_first_step() -> None:
    loop = Loop(max_steps=9)
    loop.fails_at("score s90+s91", ScoringError("scored other ids"))
    with pytest.raises(ScoringError):
        loop.run()
    assert loop.seen("learn", "save") == ["save 0"]


def test_a_failing_checkpoint_is_not_tried_again() -> None:
    loop = Loop(max_steps=9, save_every=2)
    loop.fails_at("save 2", CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="the disk is full"):
        loop.run()
    assert loop.seen("step", "save") == ["step 1", "step 2", "save 2"]


@pytest.mark.parametrize("unsaved", [CheckpointError("the disk is full"), LearnerLost("rank 0", "writing", "died")])
def test_an_error_is_not_hidden_by_the_checkpoint_that_fails_after_it(
    unsaved: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(max_steps=9)
    loop.fails_at("score s2+s3", ScoringError("teacher teacher: lost"))
    loop.fails_at("save 1", unsaved)
    with pytest.raises(ScoringError, match="teacher teacher: lost"):
        loop.run()
    assert f"no checkpoint of step 1: {unsaved}" in caplog.text


def test_a_lost_worker_that_is_no_learner_still_saves() -> None:
    loop = Loop(max_steps=9)
    loop.fails_at("score s2+s3", WorkerLost("scorer engine", "scoring", "it died"))
    with pytest.raises(WorkerLost):
        loop.run()
    assert loop.seen("save") == ["save 1"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_change(bad: float) -> None:
    loop = Loop(max_steps=9)
    loop.learner.losses["s2+s3"] = bad
    with pytest.raises(FloatingPointError, match=r"step 2: the loss is not finite; .* unchanged. Samples: s2, s3"):
        loop.run()
    assert loop.seen("optim", "save") == ["optim 1", "save 1"]
    assert loop.checkpoints.saved[1][2] == ["s0+s1"]


def test_a_loss_of_exactly_0_warns(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(max_steps=3)
    loop.learner.losses["s2+s3"] = 0.0
    with caplog.at_level(logging.WARNING, logger="opd.loop"):
        loop.run()
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: the loss is exactly 0; are student and teacher the same model?"
    ]


def test_cancelled_batches_leave_no_task() -> None:
    loop = Loop(max_steps=9, prefetch_steps=3)

    async def forever() -> None:
        await asyncio.sleep(30)

    loop.at("score s2+s3", forever)

    async def main() -> int:
        batches = ScoredBatches(loop.config, loop.source, TableScorer(loop.script))
        assert await batches.next(version=0, last_step=9) is not None
        waiting = len(asyncio.all_tasks())
        await batches.cancel()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return waiting

    assert asyncio.run(main()) > 1
    assert "scored s2+s3" not in loop.events
