"""Engines as Ray actors: what those of teachers and of the student share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ray import ObjectRef
from ray.actor import ActorHandle

from opd.cluster import await_call, kill, spawn
from opd.engine_pool import EngineInfo
from opd.errors import WorkerLost

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class EngineActor:
    """An actor whose class has `ready` and `close`; a `PooledEngine`."""

    def __init__(self, name: str, actor: ActorHandle, info: EngineInfo) -> None:
        self._name, self._actor, self._info = name, actor, info

    @property
    def name(self) -> str:
        """As `scorer engine teacher/0`."""
        return self._name

    @property
    def info(self) -> EngineInfo:
        """What it said of itself when it had loaded."""
        return self._info

    async def close(self) -> None:
        """End it in good order; kill it when it is dead, or busy for too long."""
        closing = self._actor.close.remote()
        try:
            await await_call(closing, whom=self._name, what="ending", timeout_s=CLOSE_TIMEOUT_S)
        except WorkerLost as lost:
            logger.info("%s", lost)
        finally:
            kill(self._actor)

    async def kill(self) -> None:
        """End it at once; fine for one that is dead."""
        kill(self._actor)

    async def _call(self, ref: ObjectRef[T], what: str, timeout_s: float) -> T:
        """Give what a call to it returns; `WorkerLost` when it dies or takes too long."""
        return await await_call(ref, whom=f"{self._name} (pid {self._info.pid})", what=what, timeout_s=timeout_s)


async def start_actor(
    cls: type,
    args: Sequence[Any],
    *,
    name: str,
    loads: str,
    env: Mapping[str, str],
    threads: int,
    num_gpus: int,
    start_timeout_s: float,
) -> tuple[ActorHandle, EngineInfo]:
    """Start an actor and let it load.

    Args:
        cls: Of the engine.
        args: Of its constructor.
        name: Of the engine, in messages.
        loads: What it loads, in messages.
        env: Its environment.
        threads: It computes with.
        num_gpus: It reserves.
        start_timeout_s: Longest wait for it to load.

    Raises:
        WorkerLost: It died or did not load in time; nothing of it is left.
    """
    actor = await spawn(cls, args, whom=name, env=env, threads=threads, num_gpus=num_gpus)
    try:
        loading = actor.ready.remote()
        info = await await_call(loading, whom=name, what=f"loading {loads}", timeout_s=start_timeout_s)
    except BaseException:
        kill(actor)
        raise
    return actor, info
