"""Who computes now, on hosts where engines and learner share the cores.

    rollout pump ──┐
    scoring job ───┼──► one at a time, first come first served
    learner call ──┘

Two processes that compute on the same cores at the same time each take more than twice as long: their OpenMP threads
wait for each other at every operation. On hosts with GPUs nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)


class Turns:
    """Gives turns to compute; `async with turns("learner"):`.

    Args:
        shared_cores: whether all processes compute on the same cores; if not, nobody waits.
    """

    def __init__(self, *, shared_cores: bool) -> None:
        # An asyncio lock is fair: whoever asks again right after a turn stands behind those who waited.
        self._lock = asyncio.Lock() if shared_cores else None

    @property
    def shared_cores(self) -> bool:
        """Whether somebody else would compute more slowly while we do."""
        return self._lock is not None

    @asynccontextmanager
    async def __call__(self, who: str) -> AsyncIterator[None]:
        """Wait for the turn, and have it inside the context."""
        if self._lock is None:
            yield
            return
        asked = time.monotonic()
        async with self._lock:
            logger.debug("%s has its turn after %.3f s", who, time.monotonic() - asked)
            yield


NO_TURNS = Turns(shared_cores=False)
"""Nobody waits."""
