"""Runs `python -m opd.run` on tiny models in processes of their own, and looks at what these hold and leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.checkpoint import CheckpointStore
from opd.durable import remove_leftovers
from tests.fakes import byte_tokenizer
from tests.tiny_models import make_tiny

ROOT = Path(__file__).parents[1]
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


ON_POLICY_RECIPE = """
from opd.config import *
from recipe import recipe as off_policy

def recipe(host):
    settings = {name: value for name, value in off_policy(host) if name not in ("name", "rollout", "weight_sync")}
    return RunConfig(
        **settings,
        name="own",
        rollout=RolloutConfig(max_new_tokens=16, heldout_answers=4, num_engines=2, kv_cache_gib=0.1, poll_s=0.05),
        weight_sync=WeightSyncConfig(bucket_mib=1, timeout_s=20),
    )
"""


def make_place(folder: Path) -> Path:
    """Put tiny models, rows and two recipes into a folder."""
    tokenizer = byte_tokenizer()
    for seed, name in enumerate(("teacher", "student")):
        make_tiny(folder / name, "llama", tied=True, vocab=VOCAB, seed=seed)
        (folder / name / "generation_config.json").unlink()  # its end token is not the tokenizer's
        tokenizer.save_pretrained(folder / name)
    rows = [{"question": f"what does a fruit mean? {i}", "answer": "a banana " * (1 + i % 7)} for i in range(80)]
    rows[3]["answer"] = ""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "on_policy.py").write_text(ON_POLICY_RECIPE)
    return folder


class Run:
    """A run in a process of its own, with what its processes hold."""

    def __init__(self, place: Path, name: str, *sets: str, recipe: str = "recipe.py") -> None:
        self.place, self.name = place, name
        self._out = place / f"{name}-{time.monotonic_ns()}"
        settings = [part for assignment in sets for part in ("--set", assignment)]
        command = [sys.executable, "-m", "opd.run", str(place / recipe), "--run-name", name, *settings]
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
        (found,) = self.processes_named(text)
        return found

    def processes_named(self, text: str) -> list[psutil.Process]:
        """Give its processes whose command line has a text."""
        return [p for p in self.processes() if text in " ".join(p.cmdline())]

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
