"""What the person sees, as text: widths, order, and the same text in log.txt."""

from __future__ import annotations

import errno
import io
import logging
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from opd.batches import ScoredBatch
from opd.checkpoint import Checkpoint
from opd.config import DataConfig, LoopConfig, RunConfig, StudentConfig, TeacherConfig
from opd.loop import Evaluation, Outcome, StepReport
from opd.progress import Progress
from opd.types import LossStats, OptimStats, TrainBatch

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _config(max_steps: int = 30) -> RunConfig:
    return RunConfig(
        name="gkd-offpolicy",
        student=StudentConfig(model="builtin:smollm2-pruned-20"),
        teachers=[TeacherConfig(model="builtin:smollm2-135m-instruct")],
        data=DataConfig(source="reasoning_gym:gsm_symbolic"),
        run=LoopConfig(max_steps=max_steps),
    )


def _report(step: int, *, skipped: bool = False) -> StepReport:
    batch = TrainBatch(ranks=(), trained_tokens=900, total_tokens=2100, num_samples=8)
    return StepReport(
        step=step,
        scored=ScoredBatch(samples=[], batch=batch, rollout_s=2.5, score_s=1.25, source_state={}),
        loss=LossStats(sums={"loss/total": 2.4, "loss/forward_kl": 3.2}, tokens=2),
        optim=OptimStats(grad_norm=1.0, lr=1e-4, skipped=skipped),
        sync=None,
        staleness=[],
        learn_s=6.1,
        wait_learn_s=0.14,
        wait_score_s=5.25,
        wait_rollout_s=3.5,
        step_s=7.0,
    )


def _heldout(kl: float) -> Evaluation:
    sums = {"loss/forward_kl": kl, "loss/reverse_kl": kl / 2, "loss/cross_entropy": kl + 1}
    return Evaluation(on_dataset=LossStats(sums=sums, tokens=1))


def _show(progress: Progress, folder: Path, max_steps: int = 30) -> None:
    progress.header(train_rows=968, heldout_rows=32)
    progress.phase("starting the teacher engine")
    outcome = Outcome(heldout={0: _heldout(1.6)})
    progress.evaluation(0, _heldout(1.6))
    for step in (1, 2, max_steps):
        progress.step(_report(step, skipped=step == 2))
    outcome.steps, outcome.heldout[max_steps] = max_steps, _heldout(0.4)
    progress.evaluation(max_steps, _heldout(0.4))
    best = Checkpoint(step=20, folder=folder / "checkpoints/step-20", heldout_kl=0.39, saved_at="", state={})
    progress.summary(outcome, newest=folder / f"checkpoints/step-{max_steps}", best=best)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "gkd-offpolicy"


@pytest.fixture(autouse=True)
def _clean_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    assert (root.handlers, root.level) == (handlers, level)


EXPECTED = """\
Run gkd-offpolicy
  student     builtin:smollm2-pruned-20
  teacher     builtin:smollm2-135m-instruct
  data        reasoning_gym:gsm_symbolic: 968 rows to learn from, 32 held out
  training    30 steps of 16 samples
  run folder  runs/gkd-offpolicy
  watch       tensorboard --logdir runs

starting the teacher engine
held out, step 0: fwd KL 1.6000, rev KL 0.8000, CE 2.6000
     step    loss  fwd KL tok/s score s idle learn s idle    left
     1/30  1.2000  1.6000   300     1.2  75%     6.1   2%    3:23
     2/30  1.2000  1.6000   300     1.2  75%     6.1   2%    1:38  skipped
    30/30  1.2000  1.6000   300     1.2  75%     6.1   2%    0:00
held out, step 30: fwd KL 0.4000 (-75.0%), rev KL 0.2000, CE 1.4000

Done: 30 of 30 steps in 0:00

  held out, nats per token   before (step 0)   after (step 30)   change
 ───────────────────────────────────────────────────────────────────────
  forward KL                          1.6000            0.4000   -75.0%
  reverse KL                          0.8000            0.2000   -75.0%
  cross-entropy                       2.6000            1.4000   -46.2%

  best        checkpoints/step-20, held-out forward KL 0.3900
  checkpoint  runs/gkd-offpolicy/checkpoints/step-30
  run folder  runs/gkd-offpolicy
  watch       tensorboard --logdir runs
"""


def _stripped(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def test_plain_output_to_the_letter(run_folder: Path) -> None:
    out = io.StringIO()
    with Progress(_config(), run_folder, Console(file=out, width=80)) as progress:
        _show(progress, run_folder)
    assert _stripped(out.getvalue()) == EXPECTED
    assert _stripped((run_folder / "log.txt").read_text()) == EXPECTED


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("max_steps", [30, 99_999])
def test_terminal_output_fits(run_folder: Path, width: int, max_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    with Progress(_config(max_steps), run_folder, Console(file=out, width=width, force_terminal=True)) as progress:
        _show(progress, run_folder, max_steps)
    lines = re.split(r"[\r\n]+", _ESCAPES.sub("", out.getvalue()))
    too_long = [line for line in lines if len(line) > width and "skipped" not in line]
    assert too_long == []
    assert any(re.search(rf"training ━.* 2/{max_steps}, 0:00 so far, .* left", line) for line in lines)
    assert any("starting the teacher engine ━" in line for line in lines)
    assert "\x1b" not in (run_folder / "log.txt").read_text()


def test_dumb_terminal_gets_plain_lines(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    with Progress(_config(), run_folder, Console(file=out, width=80, force_terminal=True, no_color=True)) as progress:
        _show(progress, run_folder)
    assert "━" not in out.getvalue()
    assert "starting the teacher engine\n" in _ESCAPES.sub("", out.getvalue())


def test_log_messages_go_between_the_rows_and_into_the_log(run_folder: Path) -> None:
    out = io.StringIO()
    long = "a path that must stay whole " + "x" * 100
    with Progress(_config(), run_folder, Console(file=out, width=80)) as progress:
        progress.step(_report(1))
        logging.getLogger("opd.score").info("an engine was restarted")
        logging.getLogger("opd.score").debug("nobody wants this")
        logging.getLogger("library").info("only in the log")
        logging.getLogger("library").warning("%s", long)
        logging.getLogger("opd.run").error("it ended")
        progress.step(_report(2))
    shown = out.getvalue().splitlines()
    assert shown[2:5] == ["an engine was restarted", f"warning: [library] {long}", "error: it ended"]
    log = (run_folder / "log.txt").read_text()
    for message in ("INFO opd.score: an engine was restarted", "INFO library: only in the log", f"library: {long}\n"):
        assert message in log
    assert "nobody" not in log


def test_log_is_continued_by_a_resumed_run(run_folder: Path) -> None:
    checkpoint = Checkpoint(step=15, folder=run_folder / "checkpoints/step-15", heldout_kl=None, saved_at="", state={})
    for resumed_from in (None, checkpoint):
        with Progress(_config(), run_folder, Console(file=io.StringIO(), width=80)) as progress:
            progress.header(train_rows=10, heldout_rows=0, resumed_from=resumed_from)
    log = (run_folder / "log.txt").read_text()
    assert log.count("Run gkd-offpolicy") == 2
    assert "30 steps of 16 samples, going on from step-15" in log


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (Outcome(steps=12, stopped=True), "Stopped by a signal after 12 of 30 steps in 0:00"),
        (Outcome(steps=12), "Done: 12 of 30 steps in 0:00, then the data ended"),
    ],
)
def test_other_endings(run_folder: Path, outcome: Outcome, line: str) -> None:
    out = io.StringIO()
    with Progress(_config(), run_folder, Console(file=out, width=100)) as progress:
        progress.summary(outcome, newest=None, best=None)
    assert line in out.getvalue().splitlines()
    assert "held out" not in out.getvalue()


@pytest.mark.parametrize("saved", [True, False])
def test_an_early_end_says_how_to_go_on(run_folder: Path, saved: bool) -> None:
    folder = run_folder / "checkpoints/step-10" if saved else None
    for ends in ("signal", "error"):
        out = io.StringIO()
        with Progress(_config(), run_folder, Console(file=out, width=100)) as progress:
            progress.step(_report(11))
            if ends == "signal":
                progress.summary(Outcome(steps=11, stopped=True), newest=folder, best=None)
            else:
                progress.failed(ValueError("it broke"), newest=folder)
                assert "Failed after 11 of 30 steps in 0:00" in out.getvalue()
        lines = out.getvalue().splitlines()
        if saved:
            assert "  checkpoint  runs/gkd-offpolicy/checkpoints/step-10" in lines
            assert "  go on with  --set student.model=runs/gkd-offpolicy/checkpoints/step-10" in lines
        else:
            assert "  checkpoint  none was written" in lines
        assert "it broke" not in out.getvalue(), "whoever catches the error shows it"
    assert "ValueError: it broke" in (run_folder / "log.txt").read_text()


SHOWS_MUCH = """
import sys
from pathlib import Path
from opd.progress import Progress
from tests.unit.test_progress import _config
folder = Path(sys.argv[1])
with Progress(_config(), folder) as progress:
    for number in range(2000):
        progress.phase(f"phase {number} " + "-" * 60)
print("and more", flush=True)
"""


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOWS_MUCH, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
    assert "phase 1999" in (tmp_path / "log.txt").read_text()


def test_column_heads_come_again(run_folder: Path) -> None:
    out = io.StringIO()
    with Progress(_config(100), run_folder, Console(file=out, width=80)) as progress:
        for step in range(1, 51):
            progress.step(_report(step))
    assert out.getvalue().count("fwd KL") == 2


def test_full_disk_does_not_hide_the_first_error(run_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    progress = Progress(_config(), run_folder, Console(file=io.StringIO(), width=80))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised, progress:
            progress.header(train_rows=1, heldout_rows=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert raised.value.__context__ is None
