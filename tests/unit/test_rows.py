"""Raw rows from every kind of source."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opd.config import DataConfig
from opd.data.refusals import RefusalReport, RefusedRow
from opd.data.rows import Row, check_column, lookup, plain, read_rows

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def data_config(source: Path | str, **options: object) -> DataConfig:
    return DataConfig.model_validate({"source": str(source), **options})


def read(source: Path | str, seed: int = 0, **options: object) -> list[Row | RefusedRow]:
    return read_rows(data_config(source, **options), seed=seed)


def values(rows: list[Row | RefusedRow]) -> list[Any]:
    return [row.values if isinstance(row, Row) else row for row in rows]


def locations(rows: list[Row | RefusedRow]) -> list[str]:
    return [row.location for row in rows]


def test_every_format_gives_the_same_rows_with_their_place(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "lines.json", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    for name, first in [("a.jsonl", 1), ("lines.json", 1), ("a.json", 1), ("a.parquet", 1), ("a.csv", 2)]:
        rows = read(tmp_path / name)
        assert values(rows) == ROWS
        assert locations(rows) == [f"{name}:{first}", f"{name}:{first + 1}"]


def test_folder_and_glob_read_all_files_in_order_and_tell_their_rows_apart(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b" / "part.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "a" / "part.jsonl", ROWS[:1])
    (tmp_path / "a" / "README.md").write_text("no data")
    assert locations(read(tmp_path / "a")) == ["part.jsonl:1"]
    rows = read(f"{tmp_path}/*/part.jsonl")
    assert locations(rows) == ["a/part.jsonl:1", "b/part.jsonl:1"]
    assert values(rows) == ROWS
    assert values(read(f"{tmp_path}/*/part.jsonl", max_rows=1)) == ROWS[:1]


def test_an_optional_field_may_be_null_in_one_file_and_text_in_the_next(tmp_path: Path) -> None:
    """B23: the same three rows from JSON lines and from Parquet, as plain Python values."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    first = [{"messages": messages, "teacher_prompt": None}] * 2
    second = [{"messages": messages, "teacher_prompt": "Hint: ho."}]
    write_jsonl(tmp_path / "jsonl" / "a.jsonl", first)
    write_jsonl(tmp_path / "jsonl" / "b.jsonl", second)
    for name, rows in (("a", first), ("b", second)):
        (tmp_path / "parquet").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / f"{name}.parquet")
    from_jsonl, from_parquet = values(read(tmp_path / "jsonl")), values(read(tmp_path / "parquet"))
    assert from_jsonl == from_parquet == first + second
    assert type(from_parquet[0]["messages"]) is list
    assert type(from_parquet[0]["messages"][0]) is dict


def test_malformed_lines_are_named_and_the_others_kept(tmp_path: Path) -> None:
    """B25: a malformed line is a refused row with file and line, not a crash and not a silent loss."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"question": "1"}\n{"question": \n\n["no object"]\n{"question": "\xff"}\n{"question": "2"}\n')
    rows = read(file)
    refused = [row for row in rows if isinstance(row, RefusedRow)]
    assert values([row for row in rows if isinstance(row, Row)]) == [{"question": "1"}, {"question": "2"}]
    assert [(row.location, row.reason) for row in refused] == [
        ("a.jsonl:2", "malformed JSON"),
        ("a.jsonl:4", "not a JSON object"),
        ("a.jsonl:5", "malformed JSON"),
    ]


def test_csv_rows_with_more_cells_than_columns_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('question,answer\n"two\nlines",4\n1+1?,2,extra\n2+2?,4\n')
    rows = read(file)
    assert locations(rows) == ["a.csv:2", "a.csv:4", "a.csv:5"]
    assert [isinstance(row, RefusedRow) for row in rows] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"question": 1},', "not valid JSON"),
        ("a.csv", b"question\n\xff\n", "UTF-8"),
        ("a.parquet", b"PAR0", "not a readable Parquet file"),
        ("a.jsonl", b"\n", "holds no rows"),
        ("a.txt", b"1", "no known extension"),
    ],
)
def test_an_unreadable_file_stops_with_its_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / name)
    assert name in str(error.value)


def test_a_wrong_source_stops_with_field_and_remedy(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"data\.source is .*did you mean 'train\.jsonl'.*hub:NAME"):
        read(tmp_path / "trian.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a folder without a file of \.jsonl"):
        read(tmp_path / "empty")
    config = data_config(tmp_path / "train.jsonl", heldout_source="nowhere.jsonl")
    with pytest.raises(ValueError, match=r"data\.heldout_source is 'nowhere\.jsonl'"):
        read_rows(config, seed=0, heldout=True)


def test_reasoning_gym_rows_are_seeded_and_held_out_ones_are_others() -> None:
    options: dict[str, Any] = {"source": "reasoning_gym:basic_arithmetic", "task_rows": 20}
    options["heldout_source"] = options["source"]
    rows = read(seed=3, **options)
    assert locations(rows)[:2] == ["reasoning_gym:basic_arithmetic:0", "reasoning_gym:basic_arithmetic:1"]
    assert values(rows) == values(read(seed=3, **options))
    assert values(rows) != values(read(seed=4, **options))
    heldout = read_rows(data_config(**options), seed=3, heldout=True)
    assert not {row["question"] for row in values(rows)} & {row["question"] for row in values(heldout)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "reasoning_gym:gsm_symbolc"}, "nearest are gsm_symbolic"),
        ({"task_options": {"dificulty": 1.0}}, "it has difficulty"),
        ({"task_options": {"difficulty": -1.0}}, r"data\.task_options is .* refused by gsm_symbolic"),
        ({"task_options": {"size": 3}}, r"use data\.task_rows"),
    ],
)
def test_a_wrong_reasoning_gym_task_or_option_stops_with_the_known_ones(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**{"source": "reasoning_gym:gsm_symbolic", **options})


def test_hub_rows_come_from_the_named_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, subset, split))
        if split == "missing":
            raise ValueError('Unknown split "missing"')
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    config = data_config("hub:team/set", subset="main", heldout_source="hub:team/set:test")
    assert locations(read_rows(config, seed=0)) == ["hub:team/set:0", "hub:team/set:1"]
    read_rows(config, seed=0, heldout=True)
    assert calls == [("team/set", "main", "train"), ("team/set", "main", "test")]
    with pytest.raises(ValueError, match=r"split 'missing'.*data\.split"):
        read("hub:team/set", split="missing")


def test_columns_reach_into_nested_ones_and_unknown_ones_name_the_nearest() -> None:
    rows = [Row("a:1", {"question": "q", "metadata": {"answer_cot": "a"}, "x.y": 1})]
    assert lookup(rows[0].values, "metadata.answer_cot") == "a"
    assert lookup(rows[0].values, "x.y") == 1
    assert lookup(rows[0].values, "question.inner") is None
    check_column(rows, "metadata.answer_cot", "data.response_column")
    with pytest.raises(ValueError, match=r"data\.response_column is 'answer_ct'.*'metadata.answer_cot'.*question"):
        check_column(rows, "answer_ct", "data.response_column")


def test_plain_values_hold_no_arrays_or_tuples() -> None:
    """B23: nested lists come out as lists, whatever the reader made of them."""
    value = {"a": np.array([[1, 2]]), "b": (np.float32(0.5), None), 3: {"c": np.array(["x"])}}
    assert json.loads(json.dumps(plain(value))) == {"a": [[1, 2]], "b": [0.5, None], "3": {"c": ["x"]}}


def test_the_report_counts_names_and_writes_every_refused_row(tmp_path: Path) -> None:
    """B25: rejected rows are counted and listed."""
    rows = (
        RefusedRow("a:1", "no prompt"),
        RefusedRow("a:2", "overlong prompt", "9 tokens"),
        RefusedRow("a:3", "no prompt"),
    )
    report = RefusalReport(rows, rows_read=10)
    report.write(tmp_path / "refused.jsonl")
    written = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert written[1] == {"location": "a:2", "reason": "overlong prompt", "detail": "9 tokens"}
    assert len(written) == 3
    assert report.counts == {"no prompt": 2, "overlong prompt": 1}
    assert report.summary().startswith("3 of 10 rows are not used: 2 no prompt, 1 overlong prompt.")
    assert RefusalReport((), 10).summary() == "All 10 rows read are usable."
