"""The contract of a channel, for every transport, with real processes: one learner, two engines.

NCCL's communicator is replaced by one of gloo; the rest of that transport is the real one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from opd.weight_sync import publish
from opd.weight_sync.channel import (
    SLOTS,
    BucketReceiver,
    BucketSender,
    ChannelInfo,
    TransportKind,
    forget_receiver,
    open_receiver,
    open_sender,
)
from opd.weight_sync.nccl import NcclReceiver, NcclSender
from opd.weight_sync.plan import SyncPlan, TensorSpec, make_plan
from opd.weight_sync.receive import unpack
from tests.gloo_communicator import GlooCommunicator

KINDS: tuple[TransportKind, ...] = ("shared_memory", "gloo", "nccl")
BUCKET = 1024
TENSORS = (
    TensorSpec("embed", "float32", (50, 17)),  # 3400 bytes: more than three buckets
    TensorSpec("norm", "bfloat16", (5,)),
    TensorSpec("q", "bfloat16", (16, 8)),
    TensorSpec("k", "float32", (3,)),
    TensorSpec("v", "float32", (13, 19)),
    TensorSpec("head", "bfloat16", (9, 32)),
)
PLAN = make_plan(TENSORS, BUCKET)
QUICK_S, PATIENT_S = 2.0, 30.0
CHANNEL = ChannelInfo(
    kind="shared_memory",
    name="nowhere",
    host="127.0.0.1",
    port=1,
    receivers=("engine 0 worker 0", "engine 1 worker 0"),
    bucket_bytes=PLAN.bucket_bytes,
    timeout_s=PATIENT_S,
)
"""For what never opens one."""

context = multiprocessing.get_context("forkserver")  # clean processes like spawn's, without importing torch in each
context.set_forkserver_preload(["torch", __name__])


def tensors(version: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(version)
    for spec in TENSORS:
        yield spec.name, torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))


def _open_sender(info: ChannelInfo) -> BucketSender:
    if info.kind == "nccl":
        return NcclSender(info, GlooCommunicator, lambda: f"/tmp/opd-test-{info.name}")
    return open_sender(info)


def _open_receiver(info: ChannelInfo, index: int) -> BucketReceiver:
    return NcclReceiver(info, index, GlooCommunicator) if info.kind == "nccl" else open_receiver(info, index)


class Peer:
    """A process that runs a function and tells what came of it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()

    def result(self, timeout_s: float = PATIENT_S) -> Any:
        """Give what it returned, or raise what it raised."""
        assert self.pipe.poll(timeout_s), "no answer"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _run(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(function(pipe, *args))
    except Exception as error:  # noqa: BLE001 - raised by result()
        error.__cause__ = None
        pipe.send(error)


def _publish(pipe: Connection, versions: int, buckets_before_death: int | None) -> str:
    """Serve the store, then send."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    info: ChannelInfo = pipe.recv()
    publish.open_sender = _open_sender  # type: ignore[attr-defined]
    publisher = publish.Publisher()
    publisher.open(info, PLAN)
    for version in range(versions):
        given = tensors(version)
        publisher.send(_until(given, buckets_before_death) if buckets_before_death is not None else given)
    pipe.send("sent")
    pipe.recv()  # keeps the store until the others have looked
    publisher.close()
    return "closed"


def _until(given: Iterator[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, Tensor]]:
    for number, item in enumerate(given):
        if number == count:
            os._exit(9)
        yield item


def _receive(pipe: Connection, info: ChannelInfo, index: int, versions: int, buckets_before_death: int | None) -> int:
    """Check what comes; give the bytes of all buckets."""
    receiver = _Watched(_open_receiver(info, index), buckets_before_death)
    for version in range(versions):
        expected = tensors(version)
        for name, tensor in unpack(receiver, PLAN, lambda _: None):
            wanted_name, wanted = next(expected)
            assert name == wanted_name
            assert torch.equal(tensor, wanted), f"{name} of version {version}"
        assert next(expected, None) is None
    receiver.close()
    return receiver.bytes


class _Watched:
    """A receiver that counts, and dies when told."""

    def __init__(self, receiver: BucketReceiver, buckets_before_death: int | None) -> None:
        self._receiver, self._left = receiver, buckets_before_death
        self.bytes = 0
        self.release, self.close = receiver.release, receiver.close

    def receive(self, num_bytes: int, then: int = 0) -> Tensor:
        if self._left is not None:
            if not self._left:
                os._exit(9)
            self._left -= 1
        data = self._receiver.receive(num_bytes, then)
        self.bytes += data.numel()
        return data


class Run:
    """A learner, and the channel that it waits for."""

    def __init__(
        self,
        kind: TransportKind,
        timeout_s: float,
        *,
        versions: int = 1,
        sender_dies_at: int | None = None,
        buckets_under_way: int = SLOTS,
    ) -> None:
        self.versions = versions
        self.sender = Peer(_publish, versions, sender_dies_at)
        self.info = replace(
            CHANNEL,
            kind=kind,
            name=uuid.uuid4().hex,
            port=self.sender.result(),
            timeout_s=timeout_s,
            buckets_under_way=buckets_under_way,
        )
        self.sender.pipe.send(self.info)

    def receiver(self, index: int, *, dies_at: int | None = None, timeout_s: float | None = None) -> Peer:
        info = replace(self.info, timeout_s=timeout_s or self.info.timeout_s)
        return Peer(_receive, info, index, self.versions, dies_at)

    def end(self) -> None:
        self.sender.pipe.send("end")
        assert self.sender.result() == "closed"


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever happened, no file in shared memory is left behind."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert [name for name in set(os.listdir("/dev/shm")) - before if "opd" in name] == []
    for file in Path("/tmp").glob("opd-test-*"):
        file.unlink()


@pytest.mark.parametrize("buckets_under_way", [1, SLOTS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_receiver_gets_every_byte_of_every_version(kind: TransportKind, buckets_under_way: int) -> None:
    run = Run(kind, PATIENT_S, versions=4, buckets_under_way=buckets_under_way)
    receivers = [run.receiver(i) for i in range(2)]
    assert run.sender.result() == "sent"
    filled = sum(PLAN.filled(b) for b in range(len(PLAN.buckets)))
    assert filled < len(PLAN.buckets) * BUCKET
    assert [r.result() for r in receivers] == [4 * filled] * 2
    run.end()


@pytest.mark.parametrize(("kind", "buckets_under_way"), [*((kind, SLOTS) for kind in KINDS), ("shared_memory", 1)])
def test_a_receiver_that_dies_is_named_and_the_others_hear_of_it(kind: TransportKind, buckets_under_way: int) -> None:
    run = Run(kind, QUICK_S, buckets_under_way=buckets_under_way)
    receivers = [run.receiver(0, timeout_s=PATIENT_S), run.receiver(1, dies_at=2)]
    with pytest.raises(
        (TimeoutError, ConnectionError), match=r"engine 1 worker 0 did not take a bucket .* \(bucket 3 of 6: embed\)"
    ):
        run.sender.result()
    # Long before its own timeout: the sender closes the channel, or is gone.
    with pytest.raises((TimeoutError, ConnectionError), match="learner rank 0"):
        receivers[0].result(10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_is_given_up_holds_up_nobody(kind: TransportKind) -> None:
    run = Run(kind, PATIENT_S)
    receivers = [run.receiver(0), run.receiver(1, dies_at=1)]
    receivers[1].process.join(10)
    started = time.monotonic()
    forget_receiver(run.info, 1)
    if kind == "nccl":
        with pytest.raises(ConnectionError, match="engine 1 worker 0 was lost, and NCCL cannot go on"):
            run.sender.result()
    else:
        assert run.sender.result() == "sent"
        assert receivers[0].result() == sum(PLAN.filled(b) for b in range(len(PLAN.buckets)))
        run.end()
    assert time.monotonic() - started < QUICK_S


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_dies_is_named(kind: TransportKind) -> None:
    run = Run(kind, PATIENT_S, sender_dies_at=3)
    receivers = [run.receiver(i) for i in range(2)]
    for receiver in receivers:
        with pytest.raises((TimeoutError, ConnectionError), match=r"learner rank 0 .*\(bucket \d of 6: "):
            receiver.result(10)


def test_a_sender_that_is_frozen_is_named() -> None:
    run = Run("shared_memory", PATIENT_S)
    receiver = run.receiver(0, timeout_s=QUICK_S)  # the sender waits for the other one, which never comes
    time.sleep(1.0)
    assert run.sender.process.pid is not None
    os.kill(run.sender.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises((TimeoutError, ConnectionError), match="learner rank 0"):
            receiver.result(10)
    finally:
        run.sender.process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_never_opens_is_named(kind: TransportKind) -> None:
    run = Run(kind, 1.0)
    receiver = run.receiver(0)
    with pytest.raises(TimeoutError, match=r"^engine 1 worker 0 did not "):
        run.sender.result()
    with pytest.raises((TimeoutError, ConnectionError), match="learner rank 0"):
        receiver.result()


def test_shared_memory_of_another_host_cannot_be_opened() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    info = ChannelInfo(
        kind="shared_memory",
        name="elsewhere",
        host="127.0.0.1",
        port=store.port,
        receivers=("engine 0 worker 0",),
        bucket_bytes=64,
        timeout_s=QUICK_S,
    )
    with open(__file__) as file:
        store.set("opd/elsewhere/open", f"{os.getpid()} {file.fileno()} 0")
        with pytest.raises(ConnectionError, match=r"set weight_sync\.transport to gloo"):
            open_receiver(info, 0)


class _Overwriting:
    """A receiver whose memory is garbage as soon as a bucket is released."""

    def __init__(self, plan: SyncPlan, given: Iterator[tuple[str, Tensor]]) -> None:
        self._data = list(_buckets(plan, given))
        self._slot = torch.empty(plan.bucket_bytes, dtype=torch.uint8)

    def receive(self, num_bytes: int, then: int = 0) -> Tensor:
        self._slot[:num_bytes] = self._data.pop(0)
        return self._slot[:num_bytes]

    def release(self) -> None:
        self._slot.fill_(255)

    def close(self) -> None: ...


def _buckets(plan: SyncPlan, given: Iterator[tuple[str, Tensor]]) -> Iterator[Tensor]:
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in given]
    for number, bucket in enumerate(plan.buckets):
        data = torch.zeros(plan.filled(number), dtype=torch.uint8)
        for p in bucket:
            part = flat[p.tensor][p.tensor_offset : p.tensor_offset + p.nbytes]
            data[p.bucket_offset : p.bucket_offset + p.nbytes] = part
        yield data


@pytest.mark.parametrize("bucket_bytes", [64, 512, 1024, 4096])
def test_what_is_copied_before_the_release_stays(bucket_bytes: int) -> None:
    """A consumer that keeps q and k until v is there, as vLLM does, and copies only what it still holds."""
    plan = make_plan(TENSORS, bucket_bytes)
    held: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def copy_held(bucket: Tensor) -> None:
        for name, tensor in held.items():
            if tensor.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr():
                held[name] = tensor.clone()

    for name, tensor in unpack(_Overwriting(plan, tensors(0)), plan, copy_held):
        held[name] = tensor
        if name not in ("q", "k"):
            found |= {n: t.clone() for n, t in held.items()}
            held.clear()
    for name, wanted in tensors(0):
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given[:-1], "exported no head"),
        (lambda given: [*given, ("more", torch.zeros(1))], "exported more after all 6"),
        (lambda given: [given[1], given[0], *given[2:]], "'norm'.*'embed'"),
        (lambda given: [(given[0][0], given[0][1].double()), *given[1:]], "float64"),
        (lambda given: [(given[0][0], given[0][1].T), *given[1:]], r"\(17, 50\)"),
    ],
)
def test_what_was_not_planned_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], message: str
) -> None:
    events: list[str] = []
    monkeypatch.setattr(publish, "open_sender", lambda info: _NoSender(events))
    publisher = publish.Publisher()
    publisher.open(CHANNEL, PLAN)
    with pytest.raises(ValueError, match=message):
        publisher.send(change(list(tensors(0))))
    assert events[-1] == "close"
    assert "finish" not in events


class _NoSender:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def buffer(self) -> Tensor:
        return torch.empty(PLAN.bucket_bytes, dtype=torch.uint8)

    def post(self, num_bytes: int) -> None:
        self._events.append("post")

    def finish(self) -> None:
        self._events.append("finish")

    def close(self) -> None:
        self._events.append("close")
