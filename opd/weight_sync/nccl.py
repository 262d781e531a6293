"""Buckets between GPUs: an NCCL broadcast from the learner to all receivers. The only file that knows cupy.

All receivers are ranks of one communicator, so when one is lost the channel is: the others are told, and a new channel
is opened without it. NCCL itself never times out; here nothing waits for it but by looking until a deadline.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from opd.weight_sync.channel import SENDER, SLOTS, ChannelInfo
from opd.weight_sync.signals import Signals, TwoSlotReceiver, TwoSlotSender, in_time, poll


class Transfer(Protocol):
    """A broadcast under way."""

    def done(self) -> bool:
        """Whether the buffer is sent or filled; never blocks."""
        ...


class Communicator(Protocol):
    """What is needed of NCCL; tests put gloo there."""

    slots: Tensor
    """uint8 [SLOTS, bucket_bytes]"""

    def broadcast(self, slot: int, num_bytes: int) -> Transfer:
        """Start to bring rank 0's first bytes of a slot to all ranks, after what the caller's stream has to do."""
        ...

    def close(self) -> None:
        """End it, even in the middle of a broadcast."""
        ...


class CommunicatorFactory(Protocol):
    """Joins a communicator; may block until all ranks have."""

    def __call__(self, bucket_bytes: int, unique_id: str, rank: int, num_ranks: int) -> Communicator:
        """Join as `rank`; 0 is the sender."""
        ...


def cupy_nccl() -> Any:
    """Give `cupy.cuda.nccl`, with an NCCL behind it.

    Raises:
        ValueError: There is none.
    """
    try:
        # cupy looks for the library by name only; a CUDA build of torch has brought one as a package.
        if (found := importlib.util.find_spec("nvidia.nccl")) and found.submodule_search_locations:
            for folder in found.submodule_search_locations:
                for file in Path(folder).glob("lib/libnccl.so.2"):
                    ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        from cupy.cuda import nccl  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"weight_sync.transport nccl needs cupy ({error}); install cupy-cuda12x or cupy-cuda13x, or use another"
        ) from error
    if not nccl.available:
        raise ValueError("cupy finds no libnccl.so.2; install nvidia-nccl-cu12 or -cu13, or use another transport")
    return nccl


def new_unique_id() -> str:
    """Give what the ranks of a new communicator need to find each other, as hexadecimal digits."""
    # cupy gives 128 signed bytes as integers
    return bytes(value % 256 for value in cupy_nccl().get_unique_id()).hex()


class _Event:
    """A broadcast on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()


class CupyCommunicator:
    """A `Communicator` on the current CUDA device."""

    def __init__(self, bucket_bytes: int, unique_id: str, rank: int, num_ranks: int) -> None:
        nccl = cupy_nccl()
        signed = tuple(value - 256 if value > 127 else value for value in bytes.fromhex(unique_id))
        self._uint8 = nccl.NCCL_UINT8
        self._stream = torch.cuda.Stream()
        self.slots = torch.empty(SLOTS, bucket_bytes, dtype=torch.uint8, device=torch.cuda.current_device())
        self._nccl: Any = nccl.NcclCommunicator(num_ranks, signed, rank)

    def broadcast(self, slot: int, num_bytes: int) -> Transfer:
        """See `Communicator`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._nccl.bcast(self.slots[slot].data_ptr(), num_bytes, self._uint8, 0, self._stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return _Event(event)

    def close(self) -> None:
        """See `Communicator`."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()


def _join(factory: CommunicatorFactory, signals: Signals, unique_id: str, rank: int) -> Communicator:
    """Join within the channel's timeout: NCCL would wait for ever for a rank that has died."""
    info = signals.info
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def join() -> Communicator:
        if device is not None:
            torch.cuda.set_device(device)  # the current device is a thread's own
        return factory(info.bucket_bytes, unique_id, rank, 1 + len(info.receivers))

    ranks = ", ".join((SENDER, *info.receivers))
    late = f"not all of {ranks} joined the NCCL communicator within {info.timeout_s:g} s"
    return in_time(join, info.timeout_s, late)


def _await(transfer: Transfer, timeout_s: float, what: str, do: str) -> None:
    """Wait until a broadcast is done."""
    try:
        done = poll(transfer.done, timeout_s)
    except RuntimeError as error:  # a rank that takes part in it was lost
        raise ConnectionError(f"{what} failed: {error}") from error
    if not done:
        raise TimeoutError(f"{what} did not {do} within {timeout_s:g} s")


class NcclSender(TwoSlotSender):
    """See `channel.BucketSender`."""

    def __init__(
        self,
        info: ChannelInfo,
        communicator: CommunicatorFactory = CupyCommunicator,
        unique_id: Callable[[], str] = new_unique_id,
    ) -> None:
        super().__init__(Signals(info))
        number = unique_id()
        self._signals.tell("open", number)
        self._signals.await_receivers("opened", "join the NCCL communicator")
        self._raise_if_lost()
        self._signals.tell("join")
        self._communicator = _join(communicator, self._signals, number, rank=0)
        self._transfers: list[Transfer] = []

    def _slot(self, index: int) -> Tensor:
        return self._communicator.slots[index]

    def _send(self, slot: int, num_bytes: int) -> None:
        self._transfers.append(self._communicator.broadcast(slot, num_bytes))

    def _await_released(self, bucket: int) -> None:
        super()._await_released(bucket)
        self._raise_if_lost()
        # The receivers have it; this rank's part of the broadcast ends at about the same time.
        transfer = self._transfers.pop(0)
        _await(transfer, self._signals.info.timeout_s, f"{SENDER}'s own broadcast", "end")

    def _raise_if_lost(self) -> None:
        if self._signals.lost:
            names = ", ".join(self._signals.info.receivers[i] for i in sorted(self._signals.lost))
            raise ConnectionError(f"{names} was lost, and NCCL cannot go on without one of its ranks")

    def _let_go(self) -> None:
        self._communicator.close()


class NcclReceiver(TwoSlotReceiver):
    """See `channel.BucketReceiver`."""

    def __init__(self, info: ChannelInfo, index: int, communicator: CommunicatorFactory = CupyCommunicator) -> None:
        super().__init__(Signals(info), index)
        unique_id = self._signals.await_sender("open", "offer an NCCL communicator")
        self._signals.tell(f"opened/{index}")
        self._signals.await_sender("join", "join the NCCL communicator")
        self._communicator = _join(communicator, self._signals, unique_id, rank=1 + index)
        self._coming: Transfer | None = None

    def _take(self, slot: int, num_bytes: int, then: int) -> Tensor:
        coming = self._coming or self._communicator.broadcast(slot, num_bytes)
        self._coming = None
        _await(coming, self._signals.info.timeout_s, f"{SENDER}'s broadcast", "arrive")
        if then:
            self._coming = self._communicator.broadcast(1 - slot, then)
        return self._communicator.slots[slot, :num_bytes]

    def close(self) -> None:
        """See `BucketReceiver`."""
        self._communicator.close()
