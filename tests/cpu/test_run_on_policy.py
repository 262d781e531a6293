"""Whole on-policy runs of `python -m opd.run` on tiny models: what they leave, and engines that are lost under way."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opd.metrics import METRICS
from tests.runs import Run, loads, make_place, steps_of


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """Starts on-policy runs, and ends what a failed test leaves of them."""
    place = make_place(tmp_path_factory.mktemp("own"))
    started: list[Run] = []

    def start(name: str, *sets: str) -> Run:
        started.append(Run(place, name, *sets, recipe="on_policy.py"))
        return started[-1]

    yield start
    for run in started:
        run.kill()


def test_a_run_on_its_own_answers(start: Callable[..., Run]) -> None:
    # Two learner ranks, two engines, and after every sync a comparison of their log-probabilities.
    run = start(
        "own",
        *("run.max_steps=6", "rollout.on_policy_fraction=0.8", "learner.data_parallel=2", "weight_sync.parity_every=1"),
    )
    run.until_step(1)
    run.note_what_it_holds()
    run.ends(120)
    assert run.process.returncode == 0, run.stderr
    assert run.stderr == ""
    assert "first weight sync: " in run.stdout
    assert "own answers, step 6: fwd KL " in run.stdout
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "wall_time_s"}
    assert names == set(METRICS) - {"heldout/accuracy"}, "there is no grader"
    steps = [line for line in lines if "loss/total" in line]
    assert [line["sync/weight_version"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert {line["staleness/max_versions"] for line in steps} == {0}
    assert max(line["rollout/logprob_gap"] for line in steps) < 1e-3, "the engines have the learner's weights"
    gaps = [line["parity/logprob_gap_max"] for line in lines if "parity/logprob_gap_max" in line]
    assert len(gaps) == 7, "before the first step, and after each"
    assert max(gaps) < 1e-3
    shares = [line["sample/on_policy_share"] for line in steps]
    assert 0.5 < sum(shares) / len(shares) < 1
    own = [line["heldout/own_forward_kl"] for line in lines if "heldout/own_forward_kl" in line]
    assert own[-1] < own[0]
    assert steps_of(run) == [4, 6]
    loads(run.folder / "checkpoints" / "step-6")
    run.nothing_is_left(10)


def test_engines_that_are_killed_or_frozen_cost_only_time(start: Callable[..., Run]) -> None:
    run = start(
        "hit",
        *("run.max_steps=24", "rollout.max_staleness=1", "rollout.answer_timeout_s=5", "weight_sync.timeout_s=5"),
        *("run.eval_every=0", "run.save_every=0", "weight_sync.parity_every=4"),
    )
    run.until_step(3)
    engines = run.processes_named("ray::StudentEngine")
    assert len(engines) == 2
    engines[0].kill()
    engines[1].send_signal(signal.SIGSTOP)  # for the driver it hangs, in an answer or in a sync
    run.until(lambda: "restart 2 of 3" in run.stdout, 90)
    run.note_what_it_holds()
    run.ends(150)
    assert run.process.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "rollout engine 0" in run.stdout
    assert "rollout engine 1" in run.stdout
    found = run.metrics("loss/total", "batch/samples", "staleness/max_versions", "rollout/logprob_gap")
    assert list(found) == list(range(1, 25))
    assert {samples for _, samples, _, _ in found.values()} == {8}, "nothing is lost"
    assert max(stale for _, _, stale, _ in found.values()) <= 1
    # Answers that are one step old differ by that step; weights of a restarted engine that were not brought up would
    # differ by all of them. The last probe compares the same version.
    gaps = run.metrics("parity/logprob_gap_max")
    assert max(gap for (gap,) in gaps.values()) < 1e-3
    assert max(gaps) == 24
    run.nothing_is_left(10)


def test_a_plan_shows_the_answers_and_the_sync(tmp_path: Path, start: Callable[..., Run]) -> None:
    run = start("nobody", "rollout.max_new_tokens=9000")
    run.ends(60)
    assert run.process.returncode == 2
    assert "rollout.max_new_tokens" in run.stderr
