"""Buckets in memory that learner and engines of one host share: the learner writes, the engines read in place.

The memory is an anonymous file (`memfd`), which an engine opens through the learner's `/proc` entry. It has no name
that could be left behind, however the processes end, and the size of `/dev/shm`, often 64 MiB in a container, does not
bound it.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from opd.weight_sync.channel import SENDER, SLOTS, ChannelInfo
from opd.weight_sync.signals import Signals, TwoSlotReceiver, TwoSlotSender


def _map(file: int, num_bytes: int) -> Tensor:
    """Give shared memory as uint8 [SLOTS, bucket]; it is unmapped with the last tensor that views it."""
    # All pages at once: one by one they would cost as much as the first copy.
    shared = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(shared, dtype=torch.uint8).view(SLOTS, -1)


class SharedMemorySender(TwoSlotSender):
    """See `channel.BucketSender`."""

    def __init__(self, info: ChannelInfo) -> None:
        super().__init__(Signals(info))
        num_bytes = SLOTS * info.bucket_bytes
        file = os.memfd_create(f"opd-{info.name}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, num_bytes)  # an error here rather than a bus error when memory is short
            self._slots: Tensor | None = _map(file, num_bytes)
            self._signals.tell("open", f"{os.getpid()} {file} {os.fstat(file).st_ino}")
            self._signals.await_receivers("opened", "open the shared memory")
        finally:
            os.close(file)

    def _slot(self, index: int) -> Tensor:
        assert self._slots is not None, "the channel is closed"
        return self._slots[index]

    def _send(self, slot: int, num_bytes: int) -> None:
        """Nothing: the receivers see what was written."""

    def _let_go(self) -> None:
        self._slots = None


class SharedMemoryReceiver(TwoSlotReceiver):
    """See `channel.BucketReceiver`."""

    def __init__(self, info: ChannelInfo, index: int) -> None:
        super().__init__(Signals(info), index)
        pid, number, inode = map(int, self._signals.await_sender("open", "offer shared memory").split())
        try:
            file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(file).st_ino != inode:
                    raise FileNotFoundError(f"process {pid} is another one here")
                self._slots: Tensor | None = _map(file, SLOTS * info.bucket_bytes)
            finally:
                os.close(file)
        except OSError as error:
            raise ConnectionError(
                f"{info.receivers[index]} cannot open the memory of {SENDER} ({error}); they must run on one host, in "
                "one container and as one user, else set weight_sync.transport to gloo"
            ) from error
        self._signals.tell(f"opened/{index}")

    def _take(self, slot: int, num_bytes: int, then: int) -> Tensor:
        assert self._slots is not None, "the channel is closed"
        return self._slots[slot, :num_bytes]

    def close(self) -> None:
        """See `BucketReceiver`."""
        self._slots = None
