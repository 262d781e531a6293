"""An event loop whose clock jumps to the next timer, so that hours of sleeping fakes take no time and are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time stands still while there is something to do, in threads too, and jumps when everybody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._in_threads = 0

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self._in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._left_thread)
        return future

    def _left_thread(self, _: object) -> None:
        self._in_threads -= 1

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        timers: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready and timers and not self._in_threads:
            self._now = max(self._now, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(main: Coroutine[Any, Any, Answer]) -> Answer:
    """Run a coroutine to its end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class Stage:
    """Something that takes a fixed time for each item, one after another.

    Args:
        item_s: seconds for an item.
    """

    def __init__(self, item_s: float) -> None:
        self._item_s = item_s
        self._free_at = 0.0

    async def work(self, items: int = 1) -> None:
        """Wait until it has done so many items more."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + items * self._item_s
        await asyncio.sleep(self._free_at - now)
