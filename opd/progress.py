"""What the person sees of a run: a header, a row a step, held-out measurements, a closing table.

On a terminal a progress bar stays below the rows; elsewhere the same lines are plain. Everything also goes to `log.txt`
of the run folder, and log messages come out between the rows. No line of ours needs more than 80 columns; paths and
messages of others are never cut.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from opd.checkpoint import Checkpoint
from opd.config import RunConfig
from opd.loop import Evaluation, Outcome, StepReport
from opd.metrics import heldout_values
from opd.types import SyncStats

_LOG_WIDTH = 100
_COLUMNS = (("loss", 8), ("fwd KL", 8), ("tok/s", 6))
_ROLLOUT_COLUMNS = (("roll s", 7), ("idle", 5))
_LATER_COLUMNS = (("score s", 8), ("idle", 5), ("learn s", 8), ("idle", 5), ("left", 8))
_ROWS_PER_HEAD = 40
_LABELS = {
    "forward_kl": "forward KL",
    "reverse_kl": "reverse KL",
    "cross_entropy": "cross-entropy",
    "own_forward_kl": "own answers: forward KL",
    "own_reverse_kl": "own answers: reverse KL",
    "accuracy": "own answers: accuracy",
    "response_tokens_mean": "own answers: tokens",
    "truncated_share": "own answers: cut off",
}
_SHORT = {
    "forward_kl": "fwd KL",
    "reverse_kl": "rev KL",
    "cross_entropy": "CE",
    "own_forward_kl": "fwd KL",
    "own_reverse_kl": "rev KL",
    "accuracy": "accuracy",
    "truncated_share": "cut off",
}
_LABEL_WIDTH = 12


class Progress:
    """Shows a run on the screen and keeps the same text in its `log.txt`. Use as a context manager."""

    def __init__(self, config: RunConfig, folder: Path, console: Console | None = None) -> None:
        """Prepare, and show nothing yet.

        Args:
            config: the run's.
            folder: the run's; `log.txt` in it is continued.
            console: where to show; by default standard output.
        """
        self._config, self._folder = config, folder
        self._screen = console or _Screen(highlight=False)
        self._log_file = _open_unbuffered(folder / "log.txt")
        self._log = Console(file=self._log_file, width=_LOG_WIDTH, no_color=True, highlight=False)
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}", style="dim"),
            console=self._screen,
            transient=True,
            refresh_per_second=2,  # the learner needs the cores
            disable=not self._screen.is_terminal or self._screen.is_dumb_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, note="")
        self._handlers: list[logging.Handler] = []
        self._root_level = logging.WARNING
        self._rows_since_head = 0
        self._first_step_began: float | None = None
        self._steps_seen = 0
        self._last_step = 0
        self._columns = (*_COLUMNS, *(_ROLLOUT_COLUMNS if config.rollout else ()), *_LATER_COLUMNS)
        self._first_heldout: dict[str, float] | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._root_level = root.level
        self._handlers = [_ScreenHandler(self._screen), _file_handler(self._log_file)]
        for handler in self._handlers:
            root.addHandler(handler)
        root.setLevel(logging.INFO)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
        root.setLevel(self._root_level)
        self._log_file.close()

    def header(self, *, train_rows: int, heldout_rows: int, resumed_from: Checkpoint | None = None) -> None:
        """Say what is about to run."""
        config = self._config
        steps = f"{config.run.max_steps} steps of {config.run.samples_per_step} samples"
        if resumed_from is not None:
            steps += f", going on from {resumed_from.folder.name}"
        rows = {
            "student": config.student.model,
            "teacher": ", ".join(teacher.model for teacher in config.teachers),
            "data": f"{config.data.source}: {train_rows:,} rows to learn from, {heldout_rows:,} held out",
            "training": steps,
            **self._places(),
        }
        self._print(Text(f"Run {config.name}", style="bold"))
        self._print_facts(rows)
        self._print(Text())

    def phase(self, text: str) -> None:
        """Say what is being waited for outside the steps, as "starting the teacher engine"."""
        self._bar.update(self._task, description=text, refresh=True)
        if self._bar.disable:
            self._screen.print(Text(text), soft_wrap=True)
        self._log.print(Text(text), soft_wrap=True)

    def step(self, report: StepReport) -> None:
        """Show the row of one optimiser step."""
        now = time.monotonic()
        if self._first_step_began is None:
            self._first_step_began = now - report.step_s
        self._steps_seen += 1
        self._last_step = report.step
        max_steps = self._config.run.max_steps
        left_s = (now - self._first_step_began) / self._steps_seen * (max_steps - report.step)
        means = report.loss.means()
        answered = [f"{report.scored.rollout_s:.1f}", f"{report.wait_rollout_s / report.step_s:.0%}"]
        cells = [
            f"{report.step}/{max_steps}",
            _number(means.get("loss/total")),
            _number(means.get("loss/forward_kl")),
            f"{report.scored.batch.total_tokens / report.step_s:.0f}",
            *(answered if self._config.rollout else []),
            f"{report.scored.score_s:.1f}",
            f"{report.wait_score_s / report.step_s:.0%}",
            f"{report.learn_s:.1f}",
            f"{report.wait_learn_s / report.step_s:.0%}",
            _duration(left_s),
        ]
        if self._rows_since_head % _ROWS_PER_HEAD == 0:
            self._print(Text(self._row(["step", *(name for name, _ in self._columns)]), style="dim"))
        self._rows_since_head += 1
        self._print(Text(self._row(cells) + ("  skipped" if report.optim.skipped else "")))
        note = f"{report.step}/{max_steps}, {_duration(now - self._began)} so far, {_duration(left_s)} left"
        self._bar.update(
            self._task, description="training", completed=report.step, total=max_steps, note=note, refresh=True
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Show a held-out measurement: a line for the data set's answers, a line for the student's own."""
        now = heldout_values(evaluation)
        before = self._first_heldout or {}
        self._first_heldout = self._first_heldout or now
        for what, names in (
            ("held out", ("forward_kl", "reverse_kl", "cross_entropy")),
            ("own answers", ("own_forward_kl", "own_reverse_kl", "accuracy", "truncated_share")),
        ):
            found = [f"{_SHORT[n]} {_number(now[f'heldout/{n}'])}" for n in names if f"heldout/{n}" in now]
            if not found:
                continue
            main = f"heldout/{names[0]}"
            if change := _change(before.get(main), now.get(main)):
                found[0] += f" ({change})"
            self._print(Text(f"{what}, step {step}: {', '.join(found)}", style="cyan"))

    def first_sync(self, sync: SyncStats) -> None:
        """Say that the engines have the learner's weights, and how well the two agree."""
        agree = "" if sync.gap_mean is None else f"; log-probs agree within {sync.gap_mean:.2g} nats on average"
        text = f"first weight sync: {sync.bytes / 2**20:.0f} MiB in {sync.seconds:.1f} s{agree}"
        self._print(Text(text, style="cyan"))

    def summary(self, outcome: Outcome, *, newest: Path | None, best: Checkpoint | None) -> None:
        """Show what the run came to.

        Args:
            outcome: the loop's.
            newest: folder of the newest checkpoint.
            best: the one with the lowest held-out KL.
        """
        self._bar.stop()
        self._print(Text())
        self._print(Text(self._ending(outcome), style="bold"))
        if len(outcome.heldout) > 1:
            self._print(_heldout_table(outcome))
        facts = {}
        if best is not None:
            where = f"{best.folder.parent.name}/{best.folder.name}"
            facts["best"] = f"{where}, held-out forward KL {_number(best.heldout_kl)}"
        self._print_facts({**facts, **_newest(newest, early=outcome.stopped), **self._places()})

    def failed(self, error: Exception, *, newest: Path | None) -> None:
        """Show what is left of a run that an error ended; the error itself, with its traceback, only in the log.

        Args:
            error: whoever catches it shows it on the screen.
            newest: folder of the newest checkpoint.
        """
        self._bar.stop()
        lines = [Text(), Text(f"Failed after {self._steps(self._last_step)}", style="bold")]
        lines += _facts({**_newest(newest, early=True), **self._places()})
        for line in lines:
            self._screen.print(line, soft_wrap=True)
        for line in [*lines, Text("".join(traceback.format_exception(error)))]:
            self._log.print(line, soft_wrap=True)  # last: the disk may be full

    def _ending(self, outcome: Outcome) -> str:
        steps = self._steps(outcome.steps)
        if outcome.stopped:
            return f"Stopped by a signal after {steps}"
        return f"Done: {steps}" + ("" if outcome.steps == self._config.run.max_steps else ", then the data ended")

    def _steps(self, done: int) -> str:
        return f"{done} of {self._config.run.max_steps} steps in {_duration(time.monotonic() - self._began)}"

    def _places(self) -> dict[str, str]:
        return {
            "run folder": _short(self._folder),
            "watch": f"tensorboard --logdir {_short(self._config.output_dir)}",
        }

    def _row(self, cells: Sequence[str]) -> str:
        step_width = max(9, 2 * len(str(self._config.run.max_steps)) + 3)
        widths = [step_width, *(width for _, width in self._columns)]
        return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    def _print_facts(self, facts: dict[str, str]) -> None:
        for line in _facts(facts):
            self._print(line)

    def _print(self, what: RenderableType) -> None:
        """Show it on the screen and in the log; a line that is too long for the screen stays whole for copying."""
        soft_wrap = isinstance(what, Text)
        self._screen.print(what, soft_wrap=soft_wrap)
        self._log.print(what, soft_wrap=soft_wrap)


class _Screen(Console):
    """Standard output; when its reader has gone, as `| head` does, the run goes on and its log has everything."""

    def on_broken_pipe(self) -> None:
        """Show nothing more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end


class _ScreenHandler(logging.Handler):
    """Prints our own messages, and the warnings of libraries, between the rows."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.addFilter(lambda record: record.levelno >= logging.WARNING or _is_ours(record.name))

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        style = "red" if record.levelno >= logging.ERROR else "yellow" if level else ""
        source = "" if _is_ours(record.name) else f"[{record.name}] "
        self._console.print(Text(f"{level}{source}{self.format(record)}", style=style), soft_wrap=True)


def _is_ours(logger_name: str) -> bool:
    return logger_name.split(".")[0] in ("opd", "__main__")


def _file_handler(file: IO[str]) -> logging.Handler:
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _open_unbuffered(path: Path) -> IO[str]:
    """Open for appending; a full disk shows at once, not when the file is closed after another error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return io.TextIOWrapper(path.open("ab", buffering=0), encoding="utf-8", write_through=True)


def _facts(facts: dict[str, str]) -> list[Text]:
    return [Text.assemble("  ", (f"{label:<{_LABEL_WIDTH}}", "dim"), text) for label, text in facts.items()]


def _newest(folder: Path | None, *, early: bool) -> dict[str, str]:
    """Say where the newest checkpoint is, and for a run that ended early how to go on from it."""
    if folder is None:
        return {"checkpoint": "none was written"} if early else {}
    go_on = {"go on with": f"--set student.model={_short(folder)}"} if early else {}
    return {"checkpoint": _short(folder), **go_on}


def _heldout_table(outcome: Outcome) -> Table:
    first, last = min(outcome.heldout), max(outcome.heldout)
    before, after = heldout_values(outcome.heldout[first]), heldout_values(outcome.heldout[last])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("held out, nats per token")
    for title in (f"before (step {first})", f"after (step {last})", "change"):
        table.add_column(title, justify="right")
    for name, label in _LABELS.items():
        values = before.get(f"heldout/{name}"), after.get(f"heldout/{name}")
        if values != (None, None):
            table.add_row(label, _number(values[0]), _number(values[1]), _change(*values))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.3g}"


def _change(before: float | None, after: float | None) -> str:
    """Give the change in per cent; nothing where there is nothing to compare with."""
    return f"{(after - before) / before:+.1%}" if before and after is not None else ""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(path: Path) -> str:
    """Give a path as the person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
