"""What sender and receivers of a channel tell each other, and the turns that two buffers take. Carries no weights.

Keys in the learner's store, below `opd/CHANNEL/`; `i` is a receiver, `n` counts buckets since the channel was opened:

    open         by the sender: what a receiver needs to open       opened/i     by a receiver
    posted/n     by the sender: the bucket's bytes, or CLOSED       released/n/i by a receiver
                                                                    lost/i       by the driver

A receiver blocks in the store. The sender looks again and again, at first often, since it must notice when the driver
gives a receiver up. A question to the store has no timeout that holds when the learner's process, which serves it, is
frozen: others than the learner ask in a thread that they can leave behind.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from torch import Tensor
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__
)

from opd.weight_sync.channel import SENDER, SLOTS, ChannelInfo

T = TypeVar("T")
CLOSED = "closed"
GRACE_S = 1.0
"""How much longer we wait for the store than it should take to say that it waited too long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 1e-3


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `done`; give whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    pause = FIRST_PAUSE_S
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE_S)
    return True


def in_time(function: Callable[[], T], timeout_s: float, late: str) -> T:
    """Give what a function returns that may block for ever; it is left behind in a daemon thread if it does.

    Raises:
        TimeoutError: with the message `late`.
        Exception: What the function raised.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:  # noqa: BLE001 - raised by result() in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="opd-in-time").start()
    if not wait([outcome], timeout_s).done:
        raise TimeoutError(late)
    return outcome.result()


class Signals:
    """One process's view of a channel's keys.

    Raises:
        ConnectionError: From every method, when the learner's rank 0, which serves the store, is gone.
    """

    def __init__(self, info: ChannelInfo) -> None:
        self.info = info
        self.lost: set[int] = set()
        """Receivers that were given up, as far as this process knows."""
        timeout = timedelta(seconds=info.timeout_s)
        with self._reaching_store():
            self.store = in_time(
                lambda: TCPStore(info.host, info.port, is_master=False, timeout=timeout),
                info.timeout_s + GRACE_S,
                f"{SENDER} did not let us in to its store within {info.timeout_s:g} s",
            )

    def tell(self, key: str, value: str = "") -> None:
        """Set a key."""
        with self._reaching_store():
            self.store.set(self._full(key), value)

    def known(self, *keys: str) -> bool:
        """Whether all of these are set."""
        with self._reaching_store():
            return not keys or self.store.check([self._full(key) for key in keys])

    def delete(self, *keys: str) -> None:
        """Take keys back."""
        with self._reaching_store():
            for key in keys:
                self.store.delete_key(self._full(key))

    def await_sender(self, key: str, what: str) -> str:
        """Wait for a key of the sender; `what` says what it has to do, as "send bucket 3"."""

        late = f"{SENDER} did not {what} within {self.info.timeout_s:g} s"

        def ask() -> str:
            self.store.wait([self._full(key)], timedelta(seconds=self.info.timeout_s))
            return self.store.get(self._full(key)).decode()

        try:
            with self._reaching_store():
                value = in_time(ask, self.info.timeout_s + GRACE_S, late)
        except DistStoreError as error:
            raise TimeoutError(late) from error
        if value == CLOSED:
            raise ConnectionError(f"{SENDER} has closed the channel and will not {what}")
        return value

    def await_receivers(self, key: str, what: str) -> None:
        """Wait for the key `key/i` of every receiver that has not been given up."""

        def late() -> list[int]:
            missing = [i for i in self.alive() if not self.known(f"{key}/{i}")]
            self.lost |= {i for i in missing if self.known(f"lost/{i}")}
            return [i for i in missing if i not in self.lost]

        # Most often one question to the store is enough.
        if not poll(lambda: self.known(*(f"{key}/{i}" for i in self.alive())) or not late(), self.info.timeout_s):
            names = ", ".join(self.info.receivers[i] for i in late())
            raise TimeoutError(f"{names} did not {what} within {self.info.timeout_s:g} s")

    def alive(self) -> list[int]:
        """Give the receivers that have not been given up."""
        return [i for i in range(len(self.info.receivers)) if i not in self.lost]

    def _full(self, key: str) -> str:
        return f"opd/{self.info.name}/{key}"

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            where = f"{self.info.host}:{self.info.port}"
            first_line = str(error).partition("\n")[0]
            raise ConnectionError(f"{SENDER} does not answer at {where}: {first_line}") from error


class TwoSlotSender(ABC):
    """A `BucketSender` that fills one buffer while the other is on its way."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._posted = self._released = 0  # how many buckets

    @abstractmethod
    def _slot(self, index: int) -> Tensor:
        """Give buffer 0 or 1, uint8 [bucket_bytes]."""

    @abstractmethod
    def _send(self, slot: int, num_bytes: int) -> None:
        """Start to send."""

    @abstractmethod
    def _let_go(self) -> None:
        """Free buffers and connections."""

    def _await_released(self, bucket: int) -> None:
        """Wait until no receiver needs a bucket any more."""
        self._signals.await_receivers(f"released/{bucket}", "take a bucket")

    def buffer(self) -> Tensor:
        """See `BucketSender`."""
        self._catch_up(self._posted + 1 - self._signals.info.buckets_under_way)
        return self._slot(self._posted % SLOTS)

    def post(self, num_bytes: int) -> None:
        """See `BucketSender`."""
        self._send(self._posted % SLOTS, num_bytes)
        self._signals.tell(f"posted/{self._posted}", str(num_bytes))
        self._posted += 1

    def finish(self) -> None:
        """See `BucketSender`."""
        self._catch_up(self._posted)

    def close(self) -> None:
        """See `BucketSender`."""
        self._signals.tell(f"posted/{self._posted}", CLOSED)
        self._let_go()

    def _catch_up(self, count: int) -> None:
        while self._released < count:
            n = self._released
            self._await_released(n)
            self._signals.delete(f"posted/{n}", *(f"released/{n}/{i}" for i in self._signals.alive()))
            self._released += 1


class TwoSlotReceiver(ABC):
    """A `BucketReceiver` that has two buffers as well."""

    def __init__(self, signals: Signals, index: int) -> None:
        self._signals = signals
        self._index = index
        self._received = 0  # how many buckets were released

    @abstractmethod
    def _take(self, slot: int, num_bytes: int, then: int) -> Tensor:
        """Give a bucket that has been posted; `then`: see `BucketReceiver.receive`."""

    @abstractmethod
    def close(self) -> None:
        """See `BucketReceiver`."""

    def receive(self, num_bytes: int, then: int = 0) -> Tensor:
        """See `BucketReceiver`."""
        posted = self._signals.await_sender(f"posted/{self._received}", "send a bucket")
        if int(posted) != num_bytes:
            raise RuntimeError(f"{SENDER} sent a bucket of {posted} bytes where {num_bytes} were planned")
        return self._take(self._received % SLOTS, num_bytes, then)

    def release(self) -> None:
        """See `BucketReceiver`."""
        self._signals.tell(f"released/{self._received}/{self._index}")
        self._received += 1
