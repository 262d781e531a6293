"""What the rollout pool and its engines say to each other. Imports nothing heavy.

Shapes: `P` prompt tokens, `R` response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from opd.engine_pool import PooledEngine
from opd.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRequest:
    """One prompt to answer, with every sampling value."""

    key: str
    """Names the request; never used twice in one engine."""
    prompt_ids: NDArray[np.int32]
    """[P]"""
    seed: int
    max_new_tokens: int
    temperature: float
    """0 takes the likeliest id."""
    top_p: float
    top_k: int
    """0: all ids."""
    min_p: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The answer to one request."""

    key: str
    prompt_ids: NDArray[np.int32]
    """[P] the prompt as the engine saw it; the caller compares it with what it sent."""
    response_ids: NDArray[np.int32]
    """[R] with the end token when `finish_reason` is `stop`."""
    sampling_logprobs: NDArray[np.float32]
    """[R] at temperature 1, over all ids."""
    weight_versions: NDArray[np.int32]
    """[R] of the weights that sampled each token."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PumpReply:
    """What an engine did in one call."""

    answers: Sequence[Answer]
    """Those that are finished."""
    generated_tokens: int
    """Of all requests, finished or not."""
    busy_s: float
    memory_gib: float
    """Peak memory of the engine so far: resident set, or device memory on a GPU."""


class Engine(PooledEngine, Protocol):
    """A student engine that runs. Every method raises `WorkerLost` when it died or did not answer in time."""

    async def pump(self, new: Sequence[RolloutRequest], cancel: Sequence[str]) -> PumpReply:
        """Take in requests, drop others, compute for a short while, and give the answers that are finished."""
        ...

    async def open_channel(self, init_info: Mapping[str, Any], *, timeout_s: float) -> None:
        """Check a plan of weights against the model, and get ready to receive; `ValueError` where they differ."""
        ...

    async def receive(self, version: int, *, timeout_s: float) -> None:
        """Take in the weights of a version; returns when it answers with them."""
        ...


class StartEngine(Protocol):
    """Starts engine number `index` (again)."""

    async def __call__(self, index: int) -> Engine:
        """Give an engine that has loaded.

        Raises:
            WorkerLost: It died or did not load in time; nothing of it is left.
        """
        ...
