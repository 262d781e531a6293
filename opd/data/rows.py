"""Raw rows from files, the hub or reasoning_gym, as plain Python values, each with the place it came from.

Files are read here rather than by `datasets`, which fixes a column's type from the first file (a field that is null
there and text in the next file then fails) and which stops at the first malformed line without naming it.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opd.config import DataConfig
from opd.data.refusals import RefusedRow

HELDOUT_TASK_SEED = 1_000_000_000
"""Added to a reasoning_gym task's seed for held-out rows. Its row `i` is made from `seed + i`, so that neighbouring
seeds give almost the same rows."""

MAX_CSV_FIELD = 2**24
EXTRA_CELLS = "\0"
"""Column of the cells beyond the header: a name that no file has."""


@dataclass(frozen=True, slots=True)
class Row:
    """One raw row."""

    location: str
    """`train.jsonl:17` (lines and rows of files count from 1), `hub:NAME:17`, `reasoning_gym:TASK:17` (from 0)."""
    values: Mapping[str, Any]
    """Column → None, bool, number, text, list or dict, at any depth."""


def read_rows(config: DataConfig, *, seed: int, heldout: bool = False) -> list[Row | RefusedRow]:
    """Give the rows of `data.source`, or of `data.heldout_source`, in file order; unreadable ones as refused.

    Raises:
        ValueError: the source does not exist, is empty, or is of no known kind.
    """
    field = "data.heldout_source" if heldout else "data.source"
    source = (config.heldout_source if heldout else config.source) or ""
    kind, _, name = source.partition(":")
    if kind == "hub" and name:
        rows = _hub_rows(name, config, field)
    elif kind == "reasoning_gym" and name:
        rows = _task_rows(name, config, field, seed + HELDOUT_TASK_SEED * heldout)
    else:
        rows = _file_rows(source, field)
    found = list(rows if heldout else islice(rows, config.max_rows))
    if not found:
        raise ValueError(f"{field} is {source!r}, which holds no rows; give a source with at least one")
    return found


def lookup(values: Mapping[str, Any], column: str) -> object:
    """Give the value of a column, None where the row lacks it; `a.b` reaches into a nested column."""
    if column in values:
        return values[column]
    head, _, rest = column.partition(".")
    inner = values.get(head)
    return lookup(inner, rest) if rest and isinstance(inner, Mapping) else None


def check_column(rows: Sequence[Row], column: str, field: str) -> None:
    """Stop when no row has the column.

    Raises:
        ValueError: names the columns that there are, the nearest first.
    """
    known = list(dict.fromkeys(name for row in rows for name in _column_names(row.values)))
    if rows and column not in known:
        nearest = difflib.get_close_matches(column, known, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(
            f"{field} is {column!r}, but no row has that column; {hint}The columns are: {', '.join(known)}"
        )


def _column_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _column_names(value, f"{prefix}{name}.")


def plain(value: object) -> object:
    """Give `value` in the types of JSON; what has no such form becomes text."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _plain_row(row: Mapping[str, object]) -> dict[str, object]:
    return {name: plain(value) for name, value in row.items()}


# Files


def _file_rows(source: str, field: str) -> Iterator[Row | RefusedRow]:
    files = _find_files(source, field)
    for file in files:
        if file.suffix.lower() not in _READERS:
            known = " ".join(_READERS)
            raise ValueError(f"{field} names {file.name}, which has no known extension; known are {known}")
    # Rows are told apart by file name and number, so files of one name in two folders keep their folders.
    root = Path(os.path.commonpath([file.parent for file in files]))
    for file in files:
        yield from _READERS[file.suffix.lower()](file, file.relative_to(root).as_posix())


def _find_files(source: str, field: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _READERS and file.is_file())
        if not files:
            raise ValueError(f"{field} is {source!r}, a folder without a file of {' '.join(_READERS)}")
        return files
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not source or not files:
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(
            f"{field} is {source!r}, but there is no such file or folder and no file matches it; {hint}"
            f"Give a file, folder or glob of {' '.join(_READERS)}, or hub:NAME, or reasoning_gym:TASK"
        )
    return files


def _json_row(location: str, value: object) -> Row | RefusedRow:
    if isinstance(value, dict):
        return Row(location, value)
    return RefusedRow(location, "not a JSON object", f"a {type(value).__name__}")


def _read_jsonl(file: Path, name: str) -> Iterator[Row | RefusedRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            location = f"{name}:{number}"
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                yield RefusedRow(location, "malformed JSON", str(error))
            else:
                yield _json_row(location, value)


def _read_json(file: Path, name: str) -> Iterator[Row | RefusedRow]:
    content = file.read_bytes()
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from _read_jsonl(file, name)  # many .json files are JSON lines
        return
    try:
        values = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}; mend it, or write one object a line (.jsonl)") from error
    yield from (_json_row(f"{name}:{number}", value) for number, value in enumerate(values, 1))


def _read_csv(file: Path, name: str) -> Iterator[Row | RefusedRow]:
    csv.field_size_limit(MAX_CSV_FIELD)  # the default of 131,072 characters would stop the file, not refuse the row
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, restkey=EXTRA_CELLS)
        try:
            number = reader.line_num + 1 if reader.fieldnames else 1
            for values in reader:
                location, number = f"{name}:{number}", reader.line_num + 1
                if EXTRA_CELLS in values:
                    detail = f"the header has {len(reader.fieldnames or ())} columns"
                    yield RefusedRow(location, "more cells than columns", detail)
                else:
                    yield Row(location, values)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file}, after line {reader.line_num}: {error}; write it as UTF-8 CSV") from error


def _read_parquet(file: Path, name: str) -> Iterator[Row | RefusedRow]:
    try:
        with pq.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield Row(f"{name}:{number}", _plain_row(row))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a readable Parquet file: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


# Hub and reasoning_gym: both packages take over a second to import, so they are imported where they are used.


def _hub_rows(name: str, config: DataConfig, field: str) -> Iterator[Row]:
    from datasets import load_dataset

    name, _, split = name.partition(":")
    split = split or config.split
    try:
        table = load_dataset(name, config.subset, split=split)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"{field} is hub:{name} with subset {config.subset!r} and split {split!r}, which did not load: {error}; "
            "check the name, data.subset and the split (data.split, or hub:NAME:SPLIT), and the connection"
        ) from error
    rows = cast("Iterable[Mapping[str, object]]", table)
    yield from (Row(f"hub:{name}:{number}", _plain_row(row)) for number, row in enumerate(rows))


def _task_rows(task: str, config: DataConfig, field: str, seed: int) -> Iterator[Row]:
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        nearest = difflib.get_close_matches(task, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(
            f"{field} is reasoning_gym:{task}, but there is no such task; nearest are {', '.join(nearest)}"
        )
    known = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in ("seed", "size")]
    _check_options(task, config.task_options, known)
    try:
        dataset = create_dataset(task, seed=seed, size=config.task_rows, **config.task_options)
    except (AssertionError, TypeError, ValueError) as error:  # what the tasks' own checks raise
        raise ValueError(f"data.task_options is {config.task_options}, refused by {task}: {error}") from error
    for number in range(config.task_rows):
        yield Row(f"reasoning_gym:{task}:{number}", _plain_row(dataset[number]))


def _check_options(task: str, options: Iterable[str], known: Sequence[str]) -> None:
    for name in options:
        if name in ("seed", "size"):
            remedy = "the run's seed is used" if name == "seed" else "use data.task_rows"
            raise ValueError(f"data.task_options holds {name!r}, which is set elsewhere; {remedy}")
        if name not in known:
            raise ValueError(f"data.task_options holds {name!r}, which {task} lacks; it has {', '.join(known)}")
