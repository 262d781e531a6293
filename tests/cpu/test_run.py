"""Whole runs of `python -m opd.run` on tiny models: what they leave, and what is left when they are hit.

A start takes most of the time, so runs are started two at once where they do not disturb each other.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.checkpoint import CheckpointStore
from opd.config import RunConfig
from opd.durable import remove_leftovers
from opd.metrics import METRICS
from tests.fakes import byte_tokenizer
from tests.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
START_S = 150.0
"""Longest wait for the first step; some 20 s on an idle machine."""
VOCAB = 384

RECIPE = """
from pathlib import Path
from opd.config import *

def recipe(host):
    here = Path(__file__).parent
    return RunConfig(
        name="tiny",
        output_dir=here / "runs",
        student=StudentConfig(model=str(here / "student")),
        teachers=[TeacherConfig(model=str(here / "teacher"), dtype="fp32", kv_cache_gib=0.1)],
        data=DataConfig(source=str(here / "rows.jsonl"), heldout_rows=6, max_refused_share=0.1),
        objective=GkdObjective(top_k=16),
        learner=LearnerConfig(dtype="fp32", lr=1e-3, schedule="constant", max_tokens_per_microbatch=1024),
        run=LoopConfig(max_steps=5000, samples_per_step=8, eval_every=4, save_every=4, text_samples=8),
    )
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, rows and a recipe."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = byte_tokenizer()
    for seed, name in enumerate(("teacher", "student")):
        make_tiny(folder / name, "llama", tied=True, vocab=VOCAB, seed=seed)
        (folder / name / "generation_config.json").unlink()  # its end token is not the tokenizer's
        tokenizer.save_pretrained(folder / name)
    rows = [{"question": f"what does a fruit mean? {i}", "answer": "a banana " * (1 + i % 7)} for i in range(80)]
    rows[3]["answer"] = ""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.py").write_text(RECIPE)
    return folder


class Run:
    """A run in a process of its own, with what its processes hold."""

    def __init__(self, place: Path, name: str, *sets: str) -> None:
        self.place, self.name = place, name
        self._out = place / f"{name}-{time.monotonic_ns()}"
        settings = [part for assignment in sets for part in ("--set", assignment)]
        command = [sys.executable, "-m", "opd.run", str(place / "recipe.py"), "--run-name", name, *settings]
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        with (self._out.with_suffix(".out")).open("w") as out, (self._out.with_suffix(".err")).open("w") as err:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
        self.folder = place / "runs" / name
        self._seen: dict[int, psutil.Process] = {}
        self._ports: set[int] = set()
        self._shared: set[str] = set()

    @property
    def stdout(self) -> str:
        return self._out.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self._out.with_suffix(".err").read_text()

    def metrics(self, *names: str) -> dict[int, list[Any]]:
        """Step → values of some metrics, from whole lines that have the first."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: [line[name] for name in names] for line in lines if names[0] in line}

    def store(self) -> CheckpointStore:
        assert remove_leftovers(self.folder / "checkpoints") == []
        return CheckpointStore(self.folder / "checkpoints", keep_last=9)

    def processes(self) -> list[psutil.Process]:
        """Give what it has started, directly or not: all have its session id."""
        found = []
        for process in psutil.process_iter(["pid", "status"]):
            try:
                if os.getsid(process.pid) == self.process.pid and process.pid != self.process.pid:
                    found.append(process)
            except ProcessLookupError:
                continue
        return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]

    def process_named(self, text: str) -> psutil.Process:
        """Give its process whose command line has a text, as `ray::RankActor`."""
        (found,) = [p for p in self.processes() if text in " ".join(p.cmdline())]
        return found

    def until(self, happened: Callable[[], object], timeout_s: float = START_S) -> None:
        """Wait until something has happened; the run must not end before."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"not in {timeout_s} s\n{self.stdout}\n{self.stderr}"
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: step in self.metrics("optim/lr"))

    def note_what_it_holds(self) -> None:
        """Remember its processes, listening ports and shared-memory files."""
        own = [*self.processes(), psutil.Process(self.process.pid)]
        for process in own:
            try:
                files = Path(f"/proc/{process.pid}/maps").read_text()
                ports = process.net_connections("inet")
            except (OSError, psutil.Error):
                continue
            self._seen[process.pid] = process
            self._shared |= {line.split()[-1] for line in files.splitlines() if " /dev/shm/" in line}
            self._ports |= _listening(ports)

    def ends(self, timeout_s: float) -> float:
        """Wait for its end; give the seconds that took."""
        started = time.monotonic()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s} s\n{self.stdout}\n{self.stderr}") from None
        return time.monotonic() - started

    def nothing_is_left(self, timeout_s: float) -> None:
        """See that what was noted is gone."""
        assert len(self._seen) > 5, "nothing was noted"
        assert self._ports
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=timeout_s)
        left = [p for p in [*alive, *self.processes()] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert left == []
        assert not self._ports & _listening(psutil.net_connections("inet"))
        assert [name for name in self._shared if Path(name).exists()] == []

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in self.processes():
            process.kill()


def _listening(connections: Sequence[Any]) -> set[int]:
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


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


def loads(folder: Path) -> None:
    """Load a checkpoint as anybody would, and use it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("a banana", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], VOCAB)
    assert tokenizer.chat_template


def steps_of(run: Run, *, deep: bool = True) -> list[int]:
    """Give the steps of its whole checkpoints; there must be no damaged one."""
    listing = run.store().list(deep=deep)
    assert listing.damaged == {}
    return [checkpoint.step for checkpoint in listing.whole]


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
    assert names == set(METRICS)
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
    starting.until(lambda: log.exists() and "starting the teacher engine" in log.read_text())
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
