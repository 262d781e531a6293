"""Buckets over TCP, between hosts without GPUs: a gloo connection from the learner to each receiver.

One group of two processes for each receiver rather than a broadcast in one group: a receiver that dies breaks only its
own connection, where in a broadcast those behind it in the tree would wait for it.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Work  # pyright: ignore[reportPrivateImportUsage]

from opd.weight_sync.channel import SENDER, SLOTS, ChannelInfo
from opd.weight_sync.signals import Signals, TwoSlotReceiver, TwoSlotSender

logger = logging.getLogger(__name__)


def _connect(signals: Signals, receiver: int, *, rank: int, whom: str) -> Any:
    """Connect sender (rank 0) and a receiver (rank 1)."""
    info = signals.info
    gloo: Any = ProcessGroupGloo  # Any: the stubs lack options, send and recv
    options = gloo._Options()
    options._timeout = timedelta(seconds=info.timeout_s)
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        device = gloo.create_device(interface=interface)
    else:
        # The address from which this host reaches the learner; gloo's own choice is what the host's name resolves to.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((info.host, info.port))
            device = gloo.create_device(hostname=probe.getsockname()[0])
    options._devices = [device]
    store = PrefixStore(f"opd/{info.name}/gloo/{receiver}", signals.store)
    try:
        return gloo(store, rank, 2, options)
    except RuntimeError as error:
        raise ConnectionError(f"{whom} could not be connected within {info.timeout_s:g} s: {error}") from error


class GlooSender(TwoSlotSender):
    """See `channel.BucketSender`."""

    def __init__(self, info: ChannelInfo) -> None:
        super().__init__(Signals(info))
        self._slots = torch.empty(SLOTS, info.bucket_bytes, dtype=torch.uint8)
        self._signals.tell("open")
        self._signals.await_receivers("opened", "open a connection")
        self._groups = {i: _connect(self._signals, i, rank=0, whom=info.receivers[i]) for i in self._signals.alive()}
        self._on_their_way: list[list[Work]] = [[] for _ in range(SLOTS)]

    def _slot(self, index: int) -> Tensor:
        return self._slots[index]

    def _send(self, slot: int, num_bytes: int) -> None:
        self._on_their_way[slot] = works = []
        for i in self._signals.alive():
            try:
                works.append(self._groups[i].send([self._slots[slot, :num_bytes]], 1, 0))
            except RuntimeError as error:
                # The others shall have their weights; whether this one was given up shows when it must have released.
                logger.warning("the connection to %s is broken: %s", self._signals.info.receivers[i], error)

    def _let_go(self) -> None:
        self._groups.clear()
        self._on_their_way.clear()


class GlooReceiver(TwoSlotReceiver):
    """See `channel.BucketReceiver`."""

    def __init__(self, info: ChannelInfo, index: int) -> None:
        super().__init__(Signals(info), index)
        self._slots = torch.empty(SLOTS, info.bucket_bytes, dtype=torch.uint8)
        self._signals.await_sender("open", "open a connection")
        self._signals.tell(f"opened/{index}")
        self._group: Any = _connect(self._signals, index, rank=1, whom=SENDER)
        self._coming: Work | None = None

    def _take(self, slot: int, num_bytes: int, then: int) -> Tensor:
        timeout_s = self._signals.info.timeout_s
        try:
            coming = self._coming or self._fetch(slot, num_bytes)
            self._coming = None
            coming.wait(timedelta(seconds=timeout_s))
            if then:
                self._coming = self._fetch(1 - slot, then)
        except RuntimeError as error:
            raise ConnectionError(f"{SENDER} sent no bucket within {timeout_s:g} s, or is gone: {error}") from error
        return self._slots[slot, :num_bytes]

    def _fetch(self, slot: int, num_bytes: int) -> Work:
        assert self._group is not None, "the channel is closed"
        return self._group.recv([self._slots[slot, :num_bytes]], 0, 0)

    def close(self) -> None:
        """See `BucketReceiver`."""
        self._coming = self._group = None
