"""A one-way channel for bytes: from the learner's rank 0 to every worker process of every engine.

    sender                                          receivers
    buffer() ──fill──► post(n) ── bucket 0 ──►      receive(n) ──read──► release()
    buffer() ──fill──► post(n) ── bucket 1 ──►      ...
    buffer(): waits until every receiver has released the bucket before the last one
    finish(): waits until all have released everything

Three transports, one contract. They say to each other what happened through a `TCPStore` that the learner serves; see
`signals.py`. Every wait ends after `timeout_s` with an error that names whom it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from opd.weight_sync.plan import SyncPlan, TensorSpec, make_plan

if TYPE_CHECKING:
    from torch import Tensor

SENDER = "learner rank 0"
SLOTS = 2
"""Buckets that each side has memory for."""
TransportKind = Literal["shared_memory", "gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelInfo:
    """What both sides must know to meet."""

    kind: TransportKind
    name: str
    """Unique; a channel is never opened twice."""
    host: str
    port: int
    """Of the learner's `TCPStore`."""
    receivers: tuple[str, ...]
    """Their names in messages; a receiver's index is its place here."""
    bucket_bytes: int
    timeout_s: float
    buckets_under_way: int = SLOTS
    """How many may be sent and not yet released. 1: the sender does not fill one while the other is taken."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "receivers", tuple(self.receivers))  # JSON gives a list


class BucketSender(Protocol):
    """The learner's end."""

    def buffer(self) -> Tensor:
        """Give uint8 [bucket_bytes] to fill, once no receiver reads it any more."""
        ...

    def post(self, num_bytes: int) -> None:
        """Send the first bytes of the buffer that was given last; returns at once."""
        ...

    def finish(self) -> None:
        """Wait until every receiver has released everything."""
        ...

    def close(self) -> None:
        """Let go; receivers that still wait get an error."""
        ...


class BucketReceiver(Protocol):
    """The end of one engine worker."""

    def receive(self, num_bytes: int, then: int = 0) -> Tensor:
        """Give the next bucket, uint8 [num_bytes]; its memory is reused after `release`.

        Args:
            num_bytes: Size of this bucket.
            then: Size of the one after it, so that it can be fetched meanwhile; 0: there is none.
        """
        ...

    def release(self) -> None:
        """Say that the bucket received last is not needed any more."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


def open_sender(info: ChannelInfo) -> BucketSender:
    """Open the learner's end; returns when every receiver has opened its own, or was forgotten.

    Raises:
        TimeoutError: A receiver, which it names, did not open in time.
        ConnectionError: The store, or a receiver, cannot be reached.
    """
    if info.kind == "shared_memory":
        from opd.weight_sync.shared_memory import SharedMemorySender

        return SharedMemorySender(info)
    elif info.kind == "gloo":
        from opd.weight_sync.gloo import GlooSender

        return GlooSender(info)
    elif info.kind == "nccl":
        from opd.weight_sync.nccl import NcclSender

        return NcclSender(info)
    raise ValueError(f"there is no transport {info.kind!r}")


def open_receiver(info: ChannelInfo, index: int) -> BucketReceiver:
    """Open the end of receiver `index`; waits for the sender.

    Raises:
        TimeoutError: The sender did not open in time.
        ConnectionError: The store, or the sender, cannot be reached.
    """
    if info.kind == "shared_memory":
        from opd.weight_sync.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver(info, index)
    elif info.kind == "gloo":
        from opd.weight_sync.gloo import GlooReceiver

        return GlooReceiver(info, index)
    elif info.kind == "nccl":
        from opd.weight_sync.nccl import NcclReceiver

        return NcclReceiver(info, index)
    raise ValueError(f"there is no transport {info.kind!r}")


def forget_receiver(info: ChannelInfo, index: int) -> None:
    """Make the sender wait no longer for a receiver that is lost; may be called by any process.

    With nccl the sender then fails, since NCCL cannot go on without one of its ranks.
    """
    from opd.weight_sync.signals import Signals

    Signals(info).tell(f"lost/{index}")


def init_info(channel: ChannelInfo, plan: SyncPlan, *, first_receiver: int) -> dict[str, Any]:
    """Give the argument of vLLM's `init_weight_transfer_engine` for one engine; JSON types only.

    Args:
        channel: Where the engine meets the learner.
        plan: What will be sent.
        first_receiver: Index of the engine's first worker; the others follow in tensor-parallel order.
    """
    return {
        "channel": asdict(channel),
        "tensors": [[spec.name, spec.dtype, list(spec.shape)] for spec in plan.tensors],
        "bucket_bytes": plan.bucket_bytes,
        "first_receiver": first_receiver,
    }


def parse_init_info(init: Mapping[str, Any]) -> tuple[ChannelInfo, SyncPlan, int]:
    """Give channel, plan and first receiver of an `init_info`."""
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in init["tensors"]]
    return ChannelInfo(**init["channel"]), make_plan(specs, init["bucket_bytes"]), init["first_receiver"]
