"""The driver's side of a weight sync: who sends what to whom, and what happens when one of them fails.

    closed ──open──► ready ──publish──► sending ──every engine has acknowledged──► ready, version raised
                       ▲                   │
                       │                   └── an engine fails or is late: it is killed, the others finish
                       └── the pool starts it anew; before it answers, `bring_up` sends it the weights

Engines never answer with weights of two versions at the same time: a new engine gets the version that the others have,
or, when the learner is ahead of them, all get the learner's. An engine that failed in the middle of a sync is never
used again: half of its weights are new.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from opd.config import WeightSyncConfig
from opd.errors import LearnerLost, ParityError, WorkerLost
from opd.protocols import WeightPublisher
from opd.turns import Turns
from opd.types import SyncStats
from opd.weight_sync.channel import SENDER, SLOTS, ChannelInfo, TransportKind, forget_receiver, init_info
from opd.weight_sync.plan import REFUSAL, SyncPlan, TensorSpec, make_plan
from opd.weight_sync.publish import Publisher

logger = logging.getLogger(__name__)

DRIVER_MARGIN_S = 10.0
"""The driver waits so much longer for the learner than for an engine, so that an engine that hangs is found first."""


RECEIVERS_FAULT = (TimeoutError, ConnectionError)
"""What the sender raises when a receiver is late or gone; anything else is its own fault, and no other engine helps."""


class PublishingLearner(Protocol):
    """What a sync needs of the learner; see `MegatronLearner`."""

    @property
    def weight_version(self) -> int:
        """Of the weights that a `publish` called now would send."""
        ...

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of a `TCPStore`."""
        ...

    async def weight_shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of every tensor, in the order in which they are sent."""
        ...

    async def open_publisher(self, publisher: WeightPublisher, info: Any, plan: Any, *, timeout_s: float) -> None:
        """Get ready to send."""
        ...

    async def publish(self, *, timeout_s: float) -> None:
        """Send."""
        ...


class SyncedEngine(Protocol):
    """What a sync needs of a rollout engine; every method raises `WorkerLost` when it dies or is late."""

    @property
    def name(self) -> str:
        """As `rollout engine 0`."""
        ...

    async def open_channel(self, init_info: Mapping[str, Any], *, timeout_s: float) -> None:
        """Check the plan against the model, and get ready to receive; `ValueError` where they differ."""
        ...

    async def receive(self, version: int, *, timeout_s: float) -> None:
        """Take in the weights of a version; returns when it answers with them."""
        ...


class SyncedPool(Protocol):
    """What a sync needs of the rollout engines."""

    def engines(self) -> Mapping[int, SyncedEngine]:
        """Give those that run, by number."""
        ...

    def busy(self, index: int) -> asyncio.Lock:
        """Give the lock that keeps an engine from answering."""
        ...

    def lose(self, index: int, lost: WorkerLost) -> None:
        """Give an engine up: it is killed and started anew."""
        ...


Probe = Callable[[], Awaitable[tuple[float, float]]]
"""Gives the mean and the largest gap in nats between the engines' and the learner's log-probabilities."""


class LearnerToEngines:
    """A `WeightSync` from the learner's rank 0 to every engine of a rollout pool.

    Args:
        config: Of the sync.
        kind: Of the transport.
        workers_per_engine: Processes of one engine that receive: its tensor-parallel size.
        probe: Compares engines and learner.
        tolerance: Largest mean gap in nats.
        turns: Gives the context in which the cores are ours.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        learner: PublishingLearner,
        pool: SyncedPool,
        *,
        kind: TransportKind,
        workers_per_engine: int,
        probe: Probe,
        tolerance: float,
        turns: Turns,
    ) -> None:
        self._config, self._learner, self._pool = config, learner, pool
        self._kind: TransportKind = kind
        self._workers = workers_per_engine
        self._probe = probe
        self._tolerance = tolerance
        self._turns = turns
        self._one_at_a_time = asyncio.Lock()
        self._plan: SyncPlan | None = None
        self._channel: ChannelInfo | None = None
        self._members: Mapping[int, SyncedEngine] = {}
        self._version = -1

    async def sync(self, *, probe: bool) -> SyncStats:
        """See `protocols.WeightSync`."""
        async with self._one_at_a_time:
            started = time.perf_counter()
            await self._publish_to(sorted(self._pool.engines()))
            version, plan = self._version, self._plan
        gaps = await self._probe() if probe else (None, None)
        if gaps[0] is not None and not gaps[0] <= self._tolerance:  # a NaN is no agreement
            raise ParityError(
                f"after the sync to version {version} the rollout engines' log-probabilities differ from the learner's "
                f"by {gaps[0]:.3g} nats on average (largest {gaps[1]:.3g}), more than weight_sync.parity_tolerance "
                f"{self._tolerance:g}; answers would not come from the student that is trained"
            )
        return SyncStats(
            version=version,
            seconds=time.perf_counter() - started,
            bytes=plan.total_bytes if plan else 0,
            gap_mean=gaps[0],
            gap_max=gaps[1],
        )

    async def bring_up(self, index: int) -> None:
        """Give an engine that was started anew the weights of the others, before it answers."""
        async with self._one_at_a_time:
            # Where the learner is ahead all get its weights, so that no two engines answer with different ones.
            alone = self._learner.weight_version == self._version
            await self._publish_to([index] if alone else sorted(self._pool.engines()))

    async def _publish_to(self, indices: Sequence[int]) -> None:
        async with AsyncExitStack() as held:
            for index in indices:
                await held.enter_async_context(self._pool.busy(index))
            await held.enter_async_context(self._turns("weight sync"))
            version = self._learner.weight_version
            running = self._pool.engines()
            engines = {index: running[index] for index in indices if index in running}
            lost = await self._open(engines)
            engines = {index: engine for index, engine in engines.items() if index not in lost}
            if engines:
                lost |= await self._send(engines, version)
            self._version = version
            for index, error in lost.items():  # while they are held, so that none answers once more
                self._pool.lose(index, error)

    async def _open(self, engines: Mapping[int, SyncedEngine]) -> dict[int, WorkerLost]:
        """Open a channel to these engines, unless it is open; give those that were lost meanwhile."""
        lost: dict[int, WorkerLost] = {}
        if self._plan is None:
            shapes = await self._learner.weight_shapes()
            tensors = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in shapes)
            self._plan = make_plan(tensors, self._config.bucket_mib * 2**20)
        while engines and not _same(engines, self._members):
            host, port = self._learner.store_address
            receivers = [f"{engine.name} worker {w}" for engine in engines.values() for w in range(self._workers)]
            channel = ChannelInfo(
                kind=self._kind,
                name=uuid.uuid4().hex,
                host=host,
                port=port,
                receivers=tuple(receivers),
                bucket_bytes=self._plan.bucket_bytes,
                timeout_s=self._config.timeout_s,
                # On the same cores filling and loading at once slows both down; see docs/weight_sync.md.
                buckets_under_way=1 if self._turns.shared_cores else SLOTS,
            )
            self._members, self._channel = {}, None
            opening = {
                index: engine.open_channel(
                    init_info(channel, self._plan, first_receiver=place * self._workers),
                    timeout_s=self._config.timeout_s,
                )
                for place, (index, engine) in enumerate(engines.items())
            }
            limit = self._config.timeout_s + DRIVER_MARGIN_S
            publisher_opens = self._learner.open_publisher(Publisher(), channel, self._plan, timeout_s=limit)
            failed, sender_error = await self._both_sides(publisher_opens, opening, channel)
            if not failed:
                if sender_error is not None:
                    raise sender_error
                self._members, self._channel = dict(engines), channel
                break
            lost |= failed
            engines = {index: engine for index, engine in engines.items() if index not in lost}
        return lost

    async def _send(self, engines: Mapping[int, SyncedEngine], version: int) -> dict[int, WorkerLost]:
        """Send the weights; give the engines that did not acknowledge them."""
        assert self._channel is not None
        receiving = {i: engine.receive(version, timeout_s=self._config.timeout_s) for i, engine in engines.items()}
        publishing = self._learner.publish(timeout_s=self._config.timeout_s + DRIVER_MARGIN_S)
        lost, sender_error = await self._both_sides(publishing, receiving, self._channel)
        if lost or sender_error:
            self._members, self._channel = {}, None  # the next sync opens another
        return lost

    async def _both_sides(
        self, sending: Awaitable[None], receiving: Mapping[int, Awaitable[None]], channel: ChannelInfo
    ) -> tuple[dict[int, WorkerLost], Exception | None]:
        """Wait for the learner and the engines; a lost engine does not hold up the others.

        Returns:
            The engines that failed, and what the learner raised because of them.

        Raises:
            LearnerLost: a rank was lost.
            ValueError: an engine's model is not what the learner would send.
            Exception: what the learner raised because of itself, as that it has no cupy.
        """
        send = asyncio.ensure_future(sending)
        receive: dict[asyncio.Future[None], int] = {asyncio.ensure_future(c): index for index, c in receiving.items()}
        lost: dict[int, WorkerLost] = {}
        waiting: set[asyncio.Future[None]] = {send, *receive}
        places = {index: place for place, index in enumerate(receiving)}
        names = {index: channel.receivers[place * self._workers] for index, place in places.items()}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if send in done and (error := send.exception()) and not isinstance(error, RECEIVERS_FAULT):
                    raise error  # nothing is left to sync from
                for task in done - {send}:
                    error = task.exception()
                    if error is None:
                        continue
                    if REFUSAL in str(error):
                        raise ValueError(str(error)) from error
                    index = receive[task]
                    if not isinstance(error, WorkerLost):
                        error = WorkerLost(names[index], "receiving weights", repr(error))
                    lost[index] = error
                    try:
                        for worker in range(self._workers):
                            await asyncio.to_thread(forget_receiver, channel, places[index] * self._workers + worker)
                    except RECEIVERS_FAULT as unreachable:  # the learner serves the store
                        await send  # says what became of it, at the latest after its timeout
                        raise LearnerLost(SENDER, "sending its weights", str(unreachable)) from unreachable
            sender_error = send.exception()
            assert sender_error is None or isinstance(sender_error, Exception)
            if lost and sender_error:
                logger.warning("%s could not go on without the engines that were lost: %s", SENDER, sender_error)
            return lost, sender_error
        finally:
            for task in (send, *receive):
                task.cancel()
            await asyncio.gather(send, *receive, return_exceptions=True)


def transport_kind(wanted: str, *, has_gpus: bool, num_hosts: int) -> TransportKind:
    """Give the transport that `weight_sync.transport` means on this cluster.

    Raises:
        ValueError: it cannot work here.
    """
    if wanted == "shared_memory" and num_hosts > 1:
        raise ValueError(
            f"weight_sync.transport is shared_memory, but the cluster has {num_hosts} hosts; use gloo or auto"
        )
    if wanted == "nccl" and not has_gpus:
        raise ValueError("weight_sync.transport is nccl, but there is no GPU; use shared_memory, gloo or auto")
    if wanted == "shared_memory":
        return "shared_memory"
    if wanted == "gloo":
        return "gloo"
    if wanted == "nccl" or has_gpus:
        return "nccl"
    return "gloo" if num_hosts > 1 else "shared_memory"


def _same(engines: Mapping[int, SyncedEngine], members: Mapping[int, SyncedEngine]) -> bool:
    """Whether these are the very engines that a channel was opened to."""
    return engines.keys() == members.keys() and all(engines[i] is members[i] for i in engines)
