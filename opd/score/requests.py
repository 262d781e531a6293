"""What the scorer pool and its engines say to each other. Imports nothing heavy.

Shapes: `P'` tokens of the prompt as the teacher sees it, `R` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opd.engine_pool import PooledEngine
from opd.types import TeacherScore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """One sequence to score."""

    ids: NDArray[np.int32]
    """[P'+R] prompt and response."""
    first_response: int
    """P': where the response starts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTokens:
    """The answer to one request."""

    scored_ids: NDArray[np.int32]
    """[R] the response as the engine saw it; the caller compares it with what it sent."""
    score: TeacherScore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineReply:
    """The answer to a list of requests, in their order."""

    answers: Sequence[ScoredTokens]
    memory_gib: float
    """Peak memory of the engine so far: resident set, or device memory on a GPU."""


class Engine(PooledEngine, Protocol):
    """A teacher engine that runs."""

    async def score(self, requests: Sequence[ScoreRequest]) -> EngineReply:
        """Score sequences.

        Raises:
            WorkerLost: The engine died or did not answer in time.
        """
        ...


class StartEngine(Protocol):
    """Starts engine number `index` (again)."""

    async def __call__(self, index: int) -> Engine:
        """Give an engine that has loaded.

        Raises:
            WorkerLost: It died or did not load in time; nothing of it is left.
        """
        ...
