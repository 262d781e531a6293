"""Rows that cannot be trained on: each is named, counted and written down; none is dropped in silence."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELDOUT_TWIN = "same prompt as a held-out row"
"""The one reason that is no fault of the row: it does not count towards `data.max_refused_share`."""


class RowRefusedError(Exception):
    """Ends the work on one row; whoever reads rows turns it into a `RefusedRow`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        """A few words, the same for all rows of the kind: refusals are counted by it."""
        self.detail = detail
        """What is particular to this row."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that is not used, and why."""

    location: str
    """File and line, as `train.jsonl:17`."""
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class RefusalReport:
    """All refused rows of a run's data."""

    rows: tuple[RefusedRow, ...]
    rows_read: int
    """Rows of all sources, refused ones included."""

    @property
    def counts(self) -> dict[str, int]:
        """Reason → rows, most frequent first."""
        return dict(Counter(row.reason for row in self.rows).most_common())

    def write(self, path: Path) -> None:
        """Write one JSON object a line: location, reason, detail."""
        lines = (json.dumps(dataclasses.asdict(row), ensure_ascii=False) + "\n" for row in self.rows)
        path.write_text("".join(lines), encoding="utf-8")

    def summary(self) -> str:
        """Give one paragraph for people: how many rows, for what reasons, and the first few."""
        if not self.rows:
            return f"All {self.rows_read} rows read are usable."
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
        return f"{len(self.rows)} of {self.rows_read} rows are not used: {reasons}. {first_few(self.rows)}"


def first_few(rows: Sequence[RefusedRow], count: int = 5) -> str:
    """Give the first `count` refused rows with their reasons, in one line."""
    shown = "; ".join(str(row) for row in rows[:count])
    return f"First: {shown}" + (f"; and {len(rows) - count} more." if len(rows) > count else ".")


class TooManyRefusedError(ValueError):
    """A larger share of the rows was refused than `data.max_refused_share` allows; `report` has them all."""

    def __init__(self, message: str, report: RefusalReport) -> None:
        super().__init__(message)
        self.report = report
