"""Metric names, the two files that carry them, and what a resume or a full disk does to these."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opd import metrics
from opd.batches import ScoredBatch
from opd.loop import Evaluation, StepReport
from opd.metrics import METRICS, MetricsWriter, find_metric, heldout_values, metrics_table_markdown, step_values
from opd.types import LossStats, OptimStats, RolloutTrace, Sample, SyncStats, TeacherScore, TrainBatch


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _board(folder: Path) -> EventAccumulator:
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return board


def _curve(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _board(folder).Scalars(name)]


def _sample(response: int = 3, *, ended: bool = True) -> Sample:
    return Sample(
        sample_id=f"row:{response}",
        prompt_ids=np.arange(2, dtype=np.int32),
        response_ids=np.arange(response, dtype=np.int32),
        loss_mask=np.ones(response, dtype=np.bool_),
        finish_reason="stop" if ended else "length",
        source="dataset",
        teacher="teacher",
        score=TeacherScore(
            token_logprobs=np.full(response, -0.5, dtype=np.float32),
            topk_ids=np.zeros((response, 1), dtype=np.int32),
            topk_logprobs=np.zeros((response, 1), dtype=np.float32),
            covered=np.ones(response, dtype=np.bool_),
        ),
    )


def test_the_same_numbers_in_both_files(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss/total": 1.5, "optim/lr": 1e-4})
        writer.write(2, {"loss/total": np.float32(0.25)})  # type: ignore[dict-item]
        assert len(_lines(tmp_path)) == 2  # there before the file is closed
    assert [(line["step"], line["loss/total"]) for line in _lines(tmp_path)] == [(1, 1.5), (2, 0.25)]
    assert all(line["wall_time_s"] > 1e9 for line in _lines(tmp_path))
    assert _curve(tmp_path, "loss/total") == [(1, 1.5), (2, 0.25)]
    assert _curve(tmp_path, "optim/lr") == [(1, pytest.approx(1e-4))]


@pytest.mark.parametrize("name", ["teacher/math-8b/forward_kl", "teacher/a.b_c/coverage", *METRICS])
def test_known_names(name: str) -> None:
    assert find_metric(name).meaning


@pytest.mark.parametrize("name", ["loss/forwrd_kl", "teacher/x/y/forward_kl", "teacher/x/lr", "teacher//entropy", ""])
def test_unknown_name_is_refused_and_nothing_written(tmp_path: Path, name: str) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match=r"is not in opd\.metrics\.METRICS"):
        writer.write(1, {"loss/total": 1.0, name: 1.0})
    assert _lines(tmp_path) == []


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean loss/forward_kl"):
        find_metric("loss/forwrd_kl")


def test_not_finite_is_null_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"loss/total": math.nan, "optim/grad_norm": math.inf, "optim/lr": 0.5})
    (line,) = _lines(tmp_path)
    assert line["loss/total"] is None
    assert line["optim/grad_norm"] is None
    assert line["optim/lr"] == 0.5
    assert line["not_finite"] == {"loss/total": "nan", "optim/grad_norm": "inf"}
    assert "step 3: not finite" in caplog.text


def test_resume_supersedes_what_is_written_again(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss/total": 1.0})
            writer.write_samples(step, [_sample()], str)
    with MetricsWriter(tmp_path, purge_step=5) as writer:  # resumed from the checkpoint of step 4
        assert not (tmp_path / "samples" / "step-000005.jsonl").exists()
        for step in range(5, 9):
            writer.write(step, {"loss/total": 2.0})
    expected = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0), (7, 2.0), (8, 2.0)]
    assert [(line["step"], line["loss/total"]) for line in _lines(tmp_path)] == expected
    assert _curve(tmp_path, "loss/total") == expected


def test_line_that_a_crash_cut_is_taken_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"loss/total": 1.0})
        writer.write(2, {"loss/total": 1.0})
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 10)
    with MetricsWriter(tmp_path, purge_step=3) as writer:
        writer.write(3, {"loss/total": 1.0})
    assert [line["step"] for line in _lines(tmp_path)] == [1, 3]


def test_samples_as_text(tmp_path: Path) -> None:
    def decode(ids: list[int]) -> str:
        return "<|im_start|># no *markup*\n" + " ".join(map(str, ids))

    with MetricsWriter(tmp_path) as writer:
        writer.write_samples(10, [_sample(), _sample(4)], decode)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step-000010.jsonl").read_text().splitlines()]
    assert [row["response"] for row in rows] == [decode([0, 1, 2]), decode([0, 1, 2, 3])]
    assert rows[0]["teacher_logprob_mean"] == -0.5
    texts = _board(tmp_path).Tensors("samples/1/text_summary")
    assert "    <|im_start|># no *markup*\n    0 1 2 3" in texts[0].tensor_proto.string_val[0].decode()


@contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    """Make writing beyond this size fail, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _write_steps(writer: MetricsWriter, steps: range) -> None:
    for step in steps:
        writer.write(step, {"loss/total": 1.0})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_full_disk_stops_the_run_with_a_message(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss/total": 1.0})
    with _largest_file(100), pytest.raises(OSError, match=r"cannot write the metrics of step \d+ .*; free some space"):
        _write_steps(writer, range(2, 100))
    with MetricsWriter(tmp_path, purge_step=2) as again:
        again.write(2, {"loss/total": 2.0})
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2]


def test_full_disk_stops_at_the_samples_too(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with _largest_file(100), pytest.raises(OSError, match="cannot write the samples of step 7"):
        writer.write_samples(7, [_sample()] * 10, str)
    assert list((tmp_path / "samples").iterdir()) == []


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot open the metrics"):
        MetricsWriter(tmp_path / "file")


def _report(samples: list[Sample], sync: SyncStats | None = None) -> StepReport:
    batch = TrainBatch(ranks=(), trained_tokens=5, total_tokens=10, num_samples=len(samples))
    scored = ScoredBatch(samples=samples, batch=batch, rollout_s=2.0, score_s=0.5, source_state={})
    return StepReport(
        step=1,
        scored=scored,
        loss=LossStats(sums={"loss/total": 10.0, "rollout/logprob_gap": 0.4}, tokens=5),
        optim=OptimStats(grad_norm=3.0, lr=0.1),
        sync=sync,
        staleness=scored.staleness(version=7),
        learn_s=1.5,
        wait_learn_s=0.5,
        wait_score_s=1.25,
        wait_rollout_s=0.5,
        step_s=2.0,
    )


def test_values_of_a_step(tmp_path: Path) -> None:
    values = step_values(_report([_sample(2), _sample(4, ended=False)]))
    assert values["loss/total"] == 2.0
    assert values["sample/response_tokens_mean"] == 3.0
    assert values["sample/truncated_share"] == values["sample/ended_share"] == 0.5
    assert values["sample/on_policy_share"] == 0.0
    assert values["speed/trained_tokens_per_s"] == 2.5
    assert values["speed/total_tokens_per_s"] == 5.0
    assert values["speed/score_tokens_per_s"] == 20.0
    assert values["wait/score_s"] == 1.25
    assert values["memory/driver_gib"] > 0.05
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, values)  # every name is known


def _written(length: int, versions: list[int], *, ended: bool = True) -> Sample:
    """An answer of the student's own."""
    trace = RolloutTrace(
        sampling_logprobs=np.full(length, -1.0, np.float32), weight_versions=np.array(versions, np.int32)
    )
    return dataclasses.replace(_sample(length, ended=ended), source="rollout", rollout=trace)


def test_values_of_a_step_on_the_students_own_answers(tmp_path: Path) -> None:
    sync = SyncStats(version=8, seconds=0.5, bytes=2**29, gap_mean=0.01, gap_max=0.2)
    samples = [_written(1, [6]), _written(3, [5, 5, 7], ended=False), _sample(4)]
    values = step_values(_report(samples, sync))
    assert values["sample/on_policy_share"] == 2 / 3
    assert values["sample/empty_share"] == 0.5, "an answer that is one end token"
    assert values["staleness/max_versions"] == 2.0, "by the oldest token"
    assert values["staleness/mean_versions"] == 1.5
    assert values["rollout/logprob_gap"] == pytest.approx(0.4 / 4), "over the tokens that the student wrote"
    assert values["speed/rollout_tokens_per_s"] == 2.0
    assert values["wait/rollout_s"] == 0.5
    assert values["sync/weight_version"] == 8.0
    assert values["sync/gib_per_s"] == 1.0
    assert values["parity/logprob_gap_max"] == 0.2
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, values)  # every name is known


def test_values_of_an_evaluation(tmp_path: Path) -> None:
    stats = LossStats(sums={"loss/forward_kl": 4.0, "loss/cross_entropy": 2.0, "student/entropy": 1.0}, tokens=2)
    on_dataset = {"heldout/forward_kl": 2.0, "heldout/cross_entropy": 1.0}
    assert heldout_values(Evaluation(on_dataset=stats)) == on_dataset
    assert heldout_values(Evaluation()) == {}
    both = heldout_values(Evaluation(on_dataset=stats, on_own=stats, summary={"heldout/accuracy": 0.5}))
    assert both == on_dataset | {"heldout/own_forward_kl": 2.0, "heldout/accuracy": 0.5}
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, both)


def test_checkpoints_are_compared_on_the_students_own_answers_where_there_are_any() -> None:
    data, own = (LossStats(sums={"loss/forward_kl": kl}, tokens=1) for kl in (3.0, 1.0))
    assert Evaluation(on_dataset=data).forward_kl == 3.0
    assert Evaluation(on_dataset=data, on_own=own).forward_kl == 1.0
    assert Evaluation().forward_kl is None


def test_peak_memory_of_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert 0 < metrics.peak_memory_gib(child.pid) < metrics.peak_memory_gib()
    child.communicate(b"\n")
    with pytest.raises(ProcessLookupError, match="has ended"):
        metrics.peak_memory_gib(child.pid)


def test_docs_have_the_same_table() -> None:
    docs = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert docs.read_text() == metrics_table_markdown(), "run: python -m opd.metrics > docs/metrics.md"
