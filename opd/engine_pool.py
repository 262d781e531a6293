"""What pools of engines share: starting all, one server per engine, replacing a lost one, closing.

    start ──► engine 0 .. n-1 ──► one `_serve` coroutine each ──lost──► kill, start again (at most max_restarts)

An error that ends a server ends every call that waits for the pool. Knows neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from opd.errors import WorkerLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself once it has loaded."""

    pid: int
    window: int
    """Longest sequence that it takes, in tokens."""
    vocab_size: int
    """Ids that it gives probability to."""
    load_s: float


class PooledEngine(Protocol):
    """An engine that runs: a Ray actor with vLLM, or a fake in tests."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What it said of itself when it had loaded."""
        ...

    async def close(self) -> None:
        """End it in good order, or kill it when it takes too long."""
        ...

    async def kill(self) -> None:
        """End it at once; fine for one that is dead."""
        ...


AnyEngine = TypeVar("AnyEngine", bound=PooledEngine)


class EnginePool(ABC, Generic[AnyEngine]):
    """Engines that are started, served and replaced.

    Args:
        whose: names the pool in messages, as `teacher big`.
        num_engines: how many.
        max_restarts: of lost engines before the run ends.
        start_engine: starts engine number `index`, or starts it again; `WorkerLost` when it died or did not load in
            time, and then nothing of it is left.
        error: what is raised when engines were lost too often.
        pause_s: wait after a start that failed, before the next.
    """

    def __init__(
        self,
        whose: str,
        *,
        num_engines: int,
        max_restarts: int,
        start_engine: Callable[[int], Awaitable[AnyEngine]],
        error: type[ValueError],
        pause_s: float,
    ) -> None:
        self._whose = whose
        self._num_engines, self._max_restarts = num_engines, max_restarts
        self._start_engine, self._error, self._pause_s = start_engine, error, pause_s
        self._engines: dict[int, AnyEngine] = {}
        self._servers: set[asyncio.Task[None]] = set()
        self._restarts = 0
        self._memory_gib: dict[int, float] = {}
        self._window, self._vocab_size = 0, 0

    @abstractmethod
    async def _serve(self, index: int) -> None:
        """Keep engine `index` at work, for ever; ends only by an error."""

    async def start(self) -> None:
        """Start the engines, all at once.

        Raises:
            ScoringError, RolloutError: one was lost while it loaded.
        """
        starting = [asyncio.create_task(self._start(index)) for index in range(self._num_engines)]
        try:
            await asyncio.gather(*starting)
        except BaseException as error:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)  # the first error is the one to tell
            await self.close()
            if isinstance(error, WorkerLost):
                raise self._error(f"{self._whose}: {error}") from None
            raise
        first = self.engine_infos()[0]
        self._window, self._vocab_size = first.window, first.vocab_size
        for index in self._engines:
            self._servers.add(asyncio.create_task(self._serve(index)))

    def engine_infos(self) -> list[EngineInfo]:
        """Give what the engines said when they had loaded, by number."""
        return [self._engines[index].info for index in sorted(self._engines)]

    async def close(self) -> None:
        """End the engines."""
        servers, self._servers = self._servers, set()
        for server in servers:
            server.cancel()
        await asyncio.gather(*servers, return_exceptions=True)  # what they raised, those who waited have raised
        engines, self._engines = self._engines, {}
        await asyncio.gather(*(engine.close() for engine in engines.values()))

    async def _start(self, index: int) -> None:
        engine = self._engines[index] = await self._start_engine(index)
        logger.info("%s is ready: pid %d, loaded in %.1f s", engine.name, engine.info.pid, engine.info.load_s)

    async def _replace(self, index: int, lost: WorkerLost) -> None:
        """Put a new engine in the place of a lost one."""
        await self._engines.pop(index).kill()
        while True:
            if self._restarts >= self._max_restarts:
                raise self._error(
                    f"{self._whose}: an engine was lost after {self._restarts} restarts, as many as max_restarts "
                    f"allows: {lost}"
                )
            self._restarts += 1
            logger.warning("%s\nstarting it again, restart %d of %d", lost, self._restarts, self._max_restarts)
            try:
                return await self._start(index)
            except WorkerLost as again:
                lost = again
            except (ValueError, RuntimeError) as error:
                # The same start went well before. What differs now is what the lost engine left: its memory is freed
                # only when the last of its processes has gone.
                lost = WorkerLost(lost.whom, "starting again", repr(error))
                await asyncio.sleep(self._pause_s)

    async def _all_done(self, waiting: set[asyncio.Future[Any]]) -> None:
        """Wait for futures that the servers complete; raise what ended a server."""
        if not self._servers:
            raise RuntimeError(f"the pool of {self._whose} is not running")
        while waiting:
            done, _ = await asyncio.wait({*waiting, *self._servers}, return_when=asyncio.FIRST_COMPLETED)
            for server in self._servers & done:
                server.result()
            waiting = waiting - done
