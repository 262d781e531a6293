"""A stand-in for NCCL: the same broadcasts among all ranks, by gloo on a CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, FileStore, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

from opd.weight_sync.channel import SLOTS


class GlooTransfer:
    """A broadcast under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises, if it failed
        return True


class GlooCommunicator:
    """A `nccl.Communicator`; the unique id is the path of a file."""

    def __init__(self, bucket_bytes: int, unique_id: str, rank: int, num_ranks: int) -> None:
        self.slots = torch.zeros(SLOTS, bucket_bytes, dtype=torch.uint8)
        store = FileStore(unique_id, num_ranks)
        self._group: Any = ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60))

    def broadcast(self, slot: int, num_bytes: int) -> GlooTransfer:
        options = BroadcastOptions()
        options.rootRank = 0
        return GlooTransfer(self._group.broadcast([self.slots[slot, :num_bytes]], options))

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None
