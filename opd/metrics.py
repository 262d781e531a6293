"""Every number that a run reports: its name, unit and meaning, and the writer into TensorBoard and JSON lines.

`metrics.jsonl` has one object a line: `step`, `wall_time_s` (Unix time), then name → number. A number that is not
finite is written as null, and named with what it was under `not_finite`.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from opd import durable
from opd.types import Sample, SyncStats

if TYPE_CHECKING:
    from opd.loop import Evaluation, StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number is."""

    unit: str
    meaning: str


_PER_TOKEN = "nats/token"

METRICS: dict[str, Metric] = {
    "loss/total": Metric(_PER_TOKEN, "what is minimised, mean over the trained tokens of the step"),
    "loss/forward_kl": Metric(_PER_TOKEN, "KL(teacher ‖ student), on the teacher's top K and the tail"),
    "loss/reverse_kl": Metric(_PER_TOKEN, "KL(student ‖ teacher), on the teacher's top K and the tail"),
    "loss/cross_entropy": Metric(_PER_TOKEN, "-log student(token)"),
    "optim/lr": Metric("", "learning rate of the step"),
    "optim/grad_norm": Metric("", "gradient norm before clipping"),
    "optim/skipped": Metric("0 or 1", "1: the gradient was not finite or there was nothing to train on"),
    "batch/trained_tokens": Metric("tokens", "response tokens trained on in the step, over all ranks"),
    "batch/samples": Metric("samples", "samples of the step, over all ranks"),
    "student/entropy": Metric(_PER_TOKEN, "entropy of the student at the trained tokens"),
    "teacher/entropy": Metric(_PER_TOKEN, "entropy of the teacher, on its top K and the tail"),
    "teacher/topk_mass": Metric("share", "teacher's probability on its top K ids"),
    "student/topk_mass": Metric("share", "student's probability on the teacher's top K ids"),
    "score/coverage": Metric("share", "trained tokens that are among the teacher's top K"),
    "sample/response_tokens_mean": Metric("tokens", "length of a response, end token included"),
    "sample/truncated_share": Metric("share", "responses that were cut off"),
    "sample/ended_share": Metric("share", "responses that end with an end token"),
    "sample/on_policy_share": Metric("share", "samples that the student wrote"),
    "sample/empty_share": Metric("share", "answers of the student that ended at once: nothing but an end token"),
    "sample/refused_rows": Metric("rows", "data set rows that were not used, since the start"),
    "heldout/forward_kl": Metric(_PER_TOKEN, "loss/forward_kl on the held-out rows"),
    "heldout/reverse_kl": Metric(_PER_TOKEN, "loss/reverse_kl on the held-out rows"),
    "heldout/cross_entropy": Metric(_PER_TOKEN, "loss/cross_entropy on the held-out rows"),
    "heldout/own_forward_kl": Metric(_PER_TOKEN, "loss/forward_kl on the student's own answers to held-out prompts"),
    "heldout/own_reverse_kl": Metric(_PER_TOKEN, "loss/reverse_kl on the student's own answers to held-out prompts"),
    "heldout/accuracy": Metric("share", "of the student's answers to held-out prompts: right, as data.grader judges"),
    "heldout/response_tokens_mean": Metric("tokens", "length of those answers"),
    "heldout/truncated_share": Metric("share", "those that were cut off"),
    "heldout/ended_share": Metric("share", "those that ended"),
    "rollout/logprob_gap": Metric(
        _PER_TOKEN, "mean |learner - engine log-probability| of the student's own tokens, when they are learned from"
    ),
    "staleness/max_versions": Metric(
        "steps", "optimiser steps between the weights that wrote an answer and learned it"
    ),
    "staleness/mean_versions": Metric("steps", "the same, mean over the student's answers of the step"),
    "parity/logprob_gap_max": Metric("nats", "rollout engines against the learner on the probe's tokens, same weights"),
    "parity/logprob_gap_mean": Metric("nats", "the same, mean"),
    "sync/weight_version": Metric("steps", "optimiser steps behind the weights that the rollout engines have"),
    "sync/gib_per_s": Metric("GiB/s", "size of the weights by time/sync_s"),
    "time/step_s": Metric("s", "the whole step, from waiting for its batch to its weights"),
    "time/rollout_s": Metric(
        "s", "answering of the step's prompts, first to last; overlaps scoring, and earlier steps"
    ),
    "time/score_s": Metric("s", "scoring of the step's samples, first to last; overlaps the learning of earlier steps"),
    "time/learn_s": Metric("s", "forward, backward and optimiser"),
    "time/sync_s": Metric("s", "bringing the new weights to the rollout engines, probe included"),
    "wait/rollout_s": Metric("s", "the step's time in which the rollout engines had nothing to do"),
    "wait/score_s": Metric("s", "the step's time in which the scorer had nothing to do"),
    "wait/learn_s": Metric("s", "the step's time in which the learner waited for a scored batch"),
    "speed/trained_tokens_per_s": Metric("tokens/s", "batch/trained_tokens by time/step_s"),
    "speed/total_tokens_per_s": Metric("tokens/s", "prompt and response tokens by time/step_s"),
    "speed/rollout_tokens_per_s": Metric("tokens/s", "tokens that the student wrote by time/rollout_s"),
    "speed/score_tokens_per_s": Metric("tokens/s", "tokens that the teacher read by time/score_s"),
    "memory/driver_gib": Metric("GiB", "peak resident memory of the driver process"),
    "memory/learner_gib": Metric("GiB", "peak memory of the largest learner rank: resident, or of the GPU"),
    "memory/rollout_gib": Metric("GiB", "peak memory of the rollout engines, added up: resident, or of the GPU"),
    "memory/scorer_gib": Metric("GiB", "peak memory of the teacher engines, added up: resident, or of the GPU"),
}
"""Name → what it is. The writer takes no other names."""

_ON_POLICY_GROUPS = ("rollout/", "staleness/", "parity/", "sync/", "heldout/own_")
ON_POLICY_METRICS = (
    *(name for name in METRICS if name.startswith(_ON_POLICY_GROUPS)),
    *("sample/empty_share", "heldout/accuracy", "heldout/response_tokens_mean", "heldout/truncated_share"),
    *("heldout/ended_share", "time/rollout_s", "time/sync_s", "wait/rollout_s", "speed/rollout_tokens_per_s"),
    "memory/rollout_gib",
)
"""Those that only a run with rollouts has."""

METRICS_PER_TEACHER: dict[str, Metric] = {
    "forward_kl": METRICS["loss/forward_kl"],
    "reverse_kl": METRICS["loss/reverse_kl"],
    "entropy": METRICS["teacher/entropy"],
    "topk_mass": METRICS["teacher/topk_mass"],
    "coverage": METRICS["score/coverage"],
}
"""The last part of `teacher/NAME/...` → what it is, for the samples of one teacher."""

HELDOUT = ("forward_kl", "reverse_kl", "cross_entropy")
HELDOUT_OWN = ("forward_kl", "reverse_kl")
_TEACHER_NAME = re.compile(r"teacher/[A-Za-z0-9_.-]+/(?P<last>\w+)")


def find_metric(name: str) -> Metric:
    """Give what a metric is.

    Raises:
        ValueError: there is none of that name.
    """
    if name in METRICS:
        return METRICS[name]
    match = _TEACHER_NAME.fullmatch(name)
    if match and match["last"] in METRICS_PER_TEACHER:
        return METRICS_PER_TEACHER[match["last"]]
    near = difflib.get_close_matches(name, METRICS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"metric {name!r} is not in opd.metrics.METRICS{hint}")


def metrics_table_markdown() -> str:
    """Give docs/metrics.md."""
    per_teacher = {f"teacher/NAME/{last}": metric for last, metric in METRICS_PER_TEACHER.items()}
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in (METRICS | per_teacher).items()]
    return "\n".join(
        [
            "# Metrics",
            "",
            "<!-- Made by `python -m opd.metrics > docs/metrics.md`; a test compares the two. -->",
            "",
            "The same numbers are in TensorBoard (`tensorboard --logdir runs`) and in a run folder's `metrics.jsonl`:",
            "one JSON object a line with `step`, `wall_time_s` (Unix time), then name and number. A number that is not",
            "finite is `null` there, and `not_finite` says what it was. Step 0 is the student before training.",
            "",
            "| name | unit | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def step_values(report: StepReport) -> dict[str, float]:
    """Give the metrics of one optimiser step."""
    batch, samples = report.scored.batch, report.scored.samples
    ended = [s.finish_reason == "stop" for s in samples]
    scored_tokens = sum(len(s.scored_prompt_ids) + len(s.response_ids) for s in samples)
    means = report.loss.means()
    means.pop("rollout/logprob_gap", None)  # over all tokens; see below
    return {
        **means,
        "optim/lr": report.optim.lr,
        "optim/grad_norm": report.optim.grad_norm,
        "optim/skipped": float(report.optim.skipped),
        "batch/trained_tokens": batch.trained_tokens,
        "batch/samples": batch.num_samples,
        "sample/response_tokens_mean": float(np.mean([len(s.response_ids) for s in samples])),
        "sample/ended_share": float(np.mean(ended)),
        "sample/truncated_share": 1.0 - float(np.mean(ended)),
        "sample/on_policy_share": float(np.mean([s.source == "rollout" for s in samples])),
        "time/step_s": report.step_s,
        "time/score_s": report.scored.score_s,
        "time/learn_s": report.learn_s,
        "wait/score_s": report.wait_score_s,
        "wait/learn_s": report.wait_learn_s,
        "speed/trained_tokens_per_s": batch.trained_tokens / report.step_s,
        "speed/total_tokens_per_s": batch.total_tokens / report.step_s,
        "speed/score_tokens_per_s": scored_tokens / report.scored.score_s,
        "memory/driver_gib": peak_memory_gib(),
        **_rollout_values(report),
        **(sync_values(report.sync) if report.sync else {}),
    }


def _rollout_values(report: StepReport) -> dict[str, float]:
    """Give what is known only of the student's own answers; nothing where the step has none."""
    written = [s for s in report.scored.samples if s.source == "rollout"]
    if not written:
        return {}
    own_tokens = sum(int(s.loss_mask.sum()) for s in written)
    values = {
        "sample/empty_share": float(np.mean([len(s.response_ids) == 1 and s.finish_reason == "stop" for s in written])),
        "staleness/max_versions": float(max(report.staleness)),
        "staleness/mean_versions": float(np.mean(report.staleness)),
        "time/rollout_s": report.scored.rollout_s,
        "wait/rollout_s": report.wait_rollout_s,
        "speed/rollout_tokens_per_s": sum(len(s.response_ids) for s in written) / report.scored.rollout_s,
    }
    if own_tokens:
        values["rollout/logprob_gap"] = report.loss.sums.get("rollout/logprob_gap", 0.0) / own_tokens
    return values


def sync_values(sync: SyncStats) -> dict[str, float]:
    """Give the metrics of one weight sync."""
    values = {
        "time/sync_s": sync.seconds,
        "sync/weight_version": float(sync.version),
        "sync/gib_per_s": sync.bytes / 2**30 / sync.seconds,
    }
    if sync.gap_mean is not None and sync.gap_max is not None:
        values |= {"parity/logprob_gap_mean": sync.gap_mean, "parity/logprob_gap_max": sync.gap_max}
    return values


def heldout_values(evaluation: Evaluation) -> dict[str, float]:
    """Give the metrics of one held-out evaluation."""
    values = dict(evaluation.summary)
    for stats, prefix, names in (
        (evaluation.on_dataset, "heldout/", HELDOUT),
        (evaluation.on_own, "heldout/own_", HELDOUT_OWN),
    ):
        means = stats.means() if stats else {}
        values |= {prefix + name: means[f"loss/{name}"] for name in names if f"loss/{name}" in means}
    return values


def peak_memory_gib(pid: int | None = None) -> float:
    """Give the peak resident memory of a process of this host, by default this one, in GiB (Linux).

    Raises:
        ProcessLookupError: it has ended.
    """
    try:
        status = Path(f"/proc/{'self' if pid is None else pid}/status").read_text()
    except FileNotFoundError:
        status = ""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if match is None:  # a zombie still has the file, but no memory
        raise ProcessLookupError(f"process {pid} has ended")
    return int(match[1]) / 2**20


class MetricsWriter:
    """Writes metrics and sample texts into a run folder; the disk has them when a call returns.

    A full disk stops the run: every method raises OSError with what could not be written.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        """Open the files.

        Args:
            folder: the run's.
            purge_step: first step that is written anew after a resume; what was written from there on is dropped.
        """
        self._folder = folder
        try:
            (folder / "samples").mkdir(parents=True, exist_ok=True)
            self._drop_superseded(purge_step)
            self._lines = (folder / "metrics.jsonl").open("ab", buffering=0)
            self._board = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise _stops_the_run(error, "open the metrics", folder) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step or an evaluation.

        Args:
            step: optimiser steps done, counted from the start of the run, not of the process.
            values: metric name → number.
        """
        line: dict[str, Any] = {"step": step, "wall_time_s": round(time.time(), 3)}
        not_finite = {}
        for name, value in values.items():
            find_metric(name)
            number = float(value)
            line[name] = number if math.isfinite(number) else None
            if not math.isfinite(number):
                not_finite[name] = str(number)
        if not_finite:
            line["not_finite"] = not_finite
            logger.warning("step %d: not finite, null in metrics.jsonl: %s", step, not_finite)
        try:
            _write_all(self._lines.write, json.dumps(line, allow_nan=False).encode() + b"\n")
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)
            self._board.flush()
        except OSError as error:
            raise _stops_the_run(error, f"write the metrics of step {step}", self._folder) from error

    def write_samples(self, step: int, samples: Sequence[Sample], decode: Callable[[list[int]], str]) -> None:
        """Write samples as text, to TensorBoard and to `samples/step-000010.jsonl`.

        Args:
            step: optimiser steps done.
            samples: what to show, scored or not.
            decode: ids → text, control tokens included.
        """
        rows = [_describe(sample, decode) for sample in samples]
        try:
            path = self._folder / "samples" / f"step-{step:06d}.jsonl"
            durable.write_text_durably(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            for number, row in enumerate(rows):
                self._board.add_text(f"samples/{number}", _as_markdown(row), step)
            self._board.flush()
        except OSError as error:
            raise _stops_the_run(error, f"write the samples of step {step}", self._folder) from error

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        try:
            self._board.close()
        except OSError as error:
            raise _stops_the_run(error, "close the metrics", self._folder) from error

    def _drop_superseded(self, purge_step: int | None) -> None:
        """Take out what a resumed run will write again, and a last line that a crash cut short."""
        path = self._folder / "metrics.jsonl"
        first_dropped = math.inf if purge_step is None else purge_step
        for samples in (self._folder / "samples").glob("step-*.jsonl"):
            if int(samples.stem.removeprefix("step-")) >= first_dropped:
                samples.unlink()
        if not path.exists():
            return
        text = path.read_text()
        kept = [line for line in text.splitlines() if _step_of(line) < first_dropped]
        cleaned = "".join(line + "\n" for line in kept)
        if cleaned != text:
            durable.write_text_durably(path, cleaned)


def _write_all(write: Callable[[bytes], int | None], data: bytes) -> None:
    """Write unbuffered: a nearly full disk takes a part, and the next call says why."""
    while data:
        data = data[write(data) or 0 :]


def _step_of(line: str) -> float:
    """Give the step of a line; infinity, which is always dropped, for one that is no whole JSON object."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def _describe(sample: Sample, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    row = {
        "sample_id": sample.sample_id,
        "source": sample.source,
        "teacher": sample.teacher,
        "finish_reason": sample.finish_reason,
        "prompt": decode(sample.prompt_ids.tolist()),
        "response": decode(sample.response_ids.tolist()),
        "response_tokens": len(sample.response_ids),
        "trained_tokens": int(sample.loss_mask.sum()),
    }
    if sample.score is not None:
        row["teacher_logprob_mean"] = float(sample.score.token_logprobs.mean())
        row["coverage"] = float(sample.score.covered.mean())
    return row


def _as_markdown(row: Mapping[str, Any]) -> str:
    """Give a sample as TensorBoard shows it: texts as code, so that nothing in them is taken for markup."""
    facts = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("prompt", "response"))
    blocks = ["\n".join("    " + line for line in row[name].splitlines()) for name in ("prompt", "response")]
    return f"{facts}\n\n**prompt**\n\n{blocks[0]}\n\n**response**\n\n{blocks[1]}"


def _stops_the_run(error: OSError, what: str, folder: Path) -> OSError:
    return OSError(
        error.errno, f"cannot {what} in {folder}: {error.strerror or error}; free some space or mend the folder"
    )


if __name__ == "__main__":
    print(metrics_table_markdown(), end="")
