"""Whole runs of `python -m opd.run` on tiny models: what they leave, and what is left when they are hit.

A start takes most of the time, so runs are started two at once where they do not disturb each other.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opd.config import RunConfig
from opd.metrics import METRICS, ON_POLICY_METRICS
from tests.runs import ROOT, Run, loads, make_place, steps_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, rows and recipes."""
    return make_place(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def start(place: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs, and ends what a failed test leaves of them."""
    started: list[Run] = []

    def start(name: str, *sets: str) -> Run:
        started.append(Run(place, name, *sets))
        return started[-1]

    yield start
    for run in started:
        run.kill()


# Two runs at once, of the same name; the second loses its scorer


@pytest.fixture(scope="module")
def pair(start: Callable[..., Run]) -> tuple[Run, Run]:
    """A run that nothing happens to, and the same one whose teacher engine is killed after its second step."""
    runs = [start("tiny", "run.max_steps=12")]
    runs[0].until(runs[0].folder.exists)
    runs.append(start("tiny", "run.max_steps=12"))
    runs[1].folder = runs[0].folder.with_name("tiny-2")
    runs[1].until_step(2)
    runs[1].process_named("ray::TeacherEngine").kill()
    for run in runs:
        run.note_what_it_holds()
        run.ends(120)
        assert run.process.returncode == 0, run.stderr
    return runs[0], runs[1]


def test_a_run_leaves_what_it_says(pair: tuple[Run, Run], place: Path) -> None:
    run = pair[0]
    assert run.stderr == ""
    assert "Done: 12 of 12 steps" in run.stdout
    config = RunConfig.model_validate_json((run.folder / "config.json").read_text())
    assert (config.name, config.run.max_steps, config.learner.lr) == ("tiny", 12, 1e-3)
    refused = [json.loads(line) for line in (run.folder / "refused_rows.jsonl").read_text().splitlines()]
    assert refused == [{"location": "rows.jsonl:4", "reason": "empty response", "detail": ""}]
    assert "Done: 12 of 12 steps" in (run.folder / "log.txt").read_text()
    texts = [json.loads(line) for line in (run.folder / "samples/step-000012.jsonl").read_text().splitlines()]
    assert len(texts) == 8
    assert texts[0]["prompt"].startswith("<|im_start|>user\nwhat does a fruit mean?")
    assert texts[0]["response"].endswith("banana <|im_end|>")
    assert steps_of(run) == [8, 12]
    assert (run.folder / "checkpoints" / "best").resolve() == run.folder / "checkpoints" / "step-12"
    loads(run.folder / "checkpoints" / "step-12")
    assert sorted(path.name.split(".")[0] for path in run.folder.iterdir()) == [
        *("checkpoints", "config", "events", "log", "metrics", "refused_rows", "samples"),
    ]


def test_metrics_are_complete_and_the_same_in_tensorboard(pair: tuple[Run, Run]) -> None:
    run = pair[0]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line} - {"step", "wall_time_s"}
    assert names == set(METRICS) - set(ON_POLICY_METRICS)
    assert [line["step"] for line in lines if "heldout/forward_kl" in line] == [0, 4, 8, 12]
    assert [line["step"] for line in lines if "loss/total" in line] == list(range(1, 13))
    losses = [line["heldout/forward_kl"] for line in lines if "heldout/forward_kl" in line]
    assert losses[-1] < 0.9 * losses[0]
    board = EventAccumulator(str(run.folder)).Reload()
    assert set(board.Tags()["scalars"]) == names
    for name in names:
        expected = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines if name in line]
        assert [(event.step, event.value) for event in board.Scalars(name)] == expected
    assert "samples/0/text_summary" in board.Tags()["tensors"]


def test_a_killed_scorer_changes_nothing_that_is_trained(pair: tuple[Run, Run]) -> None:
    run, hit = pair
    assert "was lost while" in hit.stdout
    assert "restart 1 of 3" in hit.stdout
    names = ("loss/total", "batch/trained_tokens", "sample/response_tokens_mean", "optim/grad_norm")
    expected, given = run.metrics(*names), hit.metrics(*names)
    assert list(given) == list(expected) == list(range(1, 13))
    for step in expected:
        assert given[step] == pytest.approx(expected[step], abs=1e-6, rel=1e-6), step
    for step in (4, 8, 12):
        texts = [(r.folder / f"samples/step-{step:06d}.jsonl").read_text().splitlines() for r in pair]
        ids = [[json.loads(line)["sample_id"] for line in lines] for lines in texts]
        assert ids[0] == ids[1]


def test_a_name_that_is_taken_gets_a_number(pair: tuple[Run, Run]) -> None:
    assert json.loads((pair[1].folder / "config.json").read_text())["name"] == "tiny-2"
    assert pair[1].stdout.startswith("Run tiny-2\n")


def test_a_finished_run_leaves_no_process(pair: tuple[Run, Run]) -> None:
    pair[1].nothing_is_left(10)


# Runs that are hit


def test_two_ranks_train_alike_and_a_killed_one_ends_the_run(pair: tuple[Run, Run], start: Callable[..., Run]) -> None:
    run = start("ranks", "learner.data_parallel=2", "learner.distributed_optimizer=true")
    alone = start("learner")
    for hit in (run, alone):
        hit.until_step(9)
        hit.note_what_it_holds()
        victim = next(p for p in hit.processes() if "ray::RankActor" in " ".join(p.cmdline()))
        victim.kill()
        assert hit.ends(60) < 60
        assert hit.process.returncode == 1
        assert "Traceback" not in hit.stderr
        assert hit.stderr.count("error: ") == 1
        assert "error: learner rank " in hit.stderr
        assert "was lost while" in hit.stderr
        assert "worker process has died" in hit.stderr
        newest = steps_of(hit)[-1]
        assert newest >= 8
        assert newest % 4 == 0, "none was written after the loss"
        assert f"--set student.model={hit.folder}/checkpoints/step-{newest}" in hit.stdout
        loads(hit.folder / "checkpoints" / f"step-{newest}")
        hit.nothing_is_left(10)
    assert "error: learner rank 0 was lost" in alone.stderr
    expected, given = pair[0].metrics("loss/total", "optim/grad_norm"), run.metrics("loss/total", "optim/grad_norm")
    for step in range(1, 10):
        assert given[step] == pytest.approx(expected[step], rel=1e-4), step


def test_interrupts(start: Callable[..., Run]) -> None:
    once, twice = start("once"), start("twice")
    once.until_step(5)
    once.note_what_it_holds()
    once.process.send_signal(signal.SIGINT)
    assert once.ends(15) < 15
    assert once.process.returncode == 130
    assert once.stderr == ""
    last = max(once.metrics("optim/lr"))
    assert steps_of(once)[-1] == last, "the last finished step"
    assert f"Stopped by a signal after {last} of 5000 steps" in once.stdout
    assert f"--set student.model={once.folder}/checkpoints/step-{last}" in once.stdout
    loads(once.folder / "checkpoints" / f"step-{last}")
    once.nothing_is_left(5)

    twice.until_step(1)
    twice.note_what_it_holds()
    twice.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    twice.process.send_signal(signal.SIGINT)
    assert twice.ends(5) < 5
    assert twice.process.returncode == 130
    twice.nothing_is_left(10)


def test_a_termination_signal_while_it_starts_and_a_killed_driver(start: Callable[..., Run]) -> None:
    starting, killed = start("starting"), start("killed")
    log = starting.folder / "log.txt"
    starting.until(lambda: log.exists() and "starting the teacher and the learner" in log.read_text())
    starting.note_what_it_holds()
    starting.process.send_signal(signal.SIGTERM)
    assert starting.ends(15) < 15
    assert starting.process.returncode == 130
    assert "Stopped by a signal after 0 of 5000 steps" in starting.stdout
    assert starting.stderr == ""
    starting.nothing_is_left(10)

    killed.until_step(1)
    killed.note_what_it_holds()
    killed.process.kill()
    killed.process.wait()
    killed.nothing_is_left(20)


def test_a_full_disk_leaves_the_older_checkpoints(start: Callable[..., Run]) -> None:
    run = start("full")
    run.until(lambda: (run.folder / "checkpoints" / "step-4").exists())
    run.note_what_it_holds()
    learner = run.process_named("ray::RankActor")
    # The learner writes the weights: no file of it may grow beyond 100 kB now, as if the disk were full.
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    run.ends(60)
    assert run.process.returncode == 1
    assert "Traceback" not in run.stderr
    assert run.stderr.startswith(f"error: checkpoint {run.folder}/checkpoints/step-")
    assert "could not be written: " in run.stderr
    assert "File too large" in run.stderr
    assert run.stderr.count("\n") == 1
    newest = steps_of(run)[-1]
    loads(run.folder / "checkpoints" / f"step-{newest}")
    assert f"--set student.model={run.folder}/checkpoints/step-{newest}" in run.stdout
    run.nothing_is_left(10)


# Wrong settings


def test_what_is_wrong_is_told_at_once(place: Path) -> None:
    shutil.copytree(place / "teacher", place / "other")
    tokenizer = json.loads((place / "other/tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (place / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    cases: list[tuple[Sequence[str], Sequence[str]]] = [
        ((str(place / "recip.py"),), ("does not exist", f"did you mean {place / 'recipe.py'}?")),
        (("--set", "learner.lrr=1"), ("learner.lrr", "learner.lr")),
        (("--set", "learner.lr=-1"), ("learner.lr", "-1", "number > 0")),
        (("--set", f"data.source={place / 'row.jsonl'}"), ("data.source", "no such file", "rows.jsonl")),
        (("--set", f"output_dir={place / 'recipe.py' / 'runs'}"), ("output_dir", "Not a directory")),
        (("--set", f"teacher.model={place / 'other'}"), ("teachers.0.model", "student")),
    ]
    started = time.monotonic()
    runs = []
    for arguments, _ in cases:
        recipe = [] if arguments[0].endswith(".py") else [str(place / "recipe.py")]
        command = [sys.executable, "-m", "opd.run", *recipe, *arguments]
        runs.append(subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        for run, (arguments, messages) in zip(runs, cases, strict=True):
            out, err = run.communicate(timeout=60)
            assert run.returncode == 2, (arguments, out, err)
            assert out == ""
            assert err.startswith("error: ")
            assert err.count("\n") == 1, err
            assert all(message in err for message in messages), err
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert time.monotonic() - started < 60
