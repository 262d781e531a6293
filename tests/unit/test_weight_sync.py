"""The driver's side of a weight sync with fakes: who gets what, and what is left when one of them fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import pytest

from opd.config import WeightSyncConfig
from opd.errors import LearnerLost, ParityError, WorkerLost
from opd.turns import Turns
from opd.weight_sync import sync as sync_module
from opd.weight_sync.channel import ChannelInfo
from opd.weight_sync.plan import REFUSAL
from opd.weight_sync.sync import LearnerToEngines, transport_kind
from tests.virtual_time import run_in_virtual_time

Act = Callable[[], Awaitable[None]]


async def hangs() -> None:
    await asyncio.sleep(10_000)


def fails(error: Exception, after_s: float = 0.0) -> Act:
    async def act() -> None:
        await asyncio.sleep(after_s)
        raise error

    return act


def lost(name: str, reason: str = "it died", after_s: float = 0.0) -> Act:
    return fails(WorkerLost(name, "receiving weights", reason), after_s)


class Place:
    """Learner, engines and pool of a sync, and all that happens in order."""

    def __init__(self, engines: int = 2, *, workers: int = 1) -> None:
        self.events: list[str] = []
        self.acts: dict[str, Act] = {}
        """What happens with the next event of that name, instead of nothing."""
        self.weight_version = 0
        self.gaps = (1e-5, 1e-4)
        self.versions: dict[str, int] = {}
        """Engine → version of its weights."""
        self.running = {index: Engine(self, index) for index in range(engines)}
        self.locks = {index: asyncio.Lock() for index in range(engines)}
        self.lost: dict[int, WorkerLost] = {}
        self.forgotten: list[str] = []
        self.channels: list[ChannelInfo] = []
        self.turns = Turns(shared_cores=True)
        self.sync = LearnerToEngines(
            WeightSyncConfig(timeout_s=5.0, bucket_mib=1),
            self,
            self,
            kind="shared_memory",
            workers_per_engine=workers,
            probe=self._probe,
            tolerance=1e-3,
            turns=self.turns,
        )

    async def happens(self, event: str) -> None:
        self.events.append(event)
        await asyncio.sleep(0.1)
        if event in self.acts:
            await self.acts.pop(event)()

    async def _probe(self) -> tuple[float, float]:
        await self.happens("probe")
        return self.gaps

    # What a sync needs of the learner

    @property
    def store_address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def weight_shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [("a", "float32", (3, 2)), ("b", "bfloat16", (5,))]

    async def open_publisher(self, publisher: Any, info: Any, plan: Any, *, timeout_s: float) -> None:
        self.channels.append(info)
        await self.happens("learner opens")

    async def publish(self, *, timeout_s: float) -> None:
        await self.happens("learner sends")

    # What it needs of the pool

    def engines(self) -> Mapping[int, Engine]:
        return self.running

    def busy(self, index: int) -> asyncio.Lock:
        return self.locks[index]

    def lose(self, index: int, lost: WorkerLost) -> None:
        assert self.locks[index].locked(), "given up while it may answer"
        self.running = {i: engine for i, engine in self.running.items() if i != index}
        self.lost[index] = lost

    def start_anew(self, index: int) -> None:
        self.running = {**self.running, index: Engine(self, index)}


class Engine:
    """A rollout engine; takes part in a sync only while it is held."""

    def __init__(self, place: Place, index: int) -> None:
        self._place, self._index = place, index
        place.versions[self.name] = -1

    @property
    def name(self) -> str:
        return f"rollout engine {self._index}"

    async def open_channel(self, init_info: Mapping[str, Any], *, timeout_s: float) -> None:
        assert timeout_s == 5.0
        assert self._place.locks[self._index].locked()
        await self._place.happens(f"{self._index} opens")

    async def receive(self, version: int, *, timeout_s: float) -> None:
        assert timeout_s == 5.0
        assert self._place.locks[self._index].locked()
        await self._place.happens(f"{self._index} receives {version}")
        self._place.versions[self.name] = version


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place()
    watch_store(made, monkeypatch)
    return made


def watch_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note who is given up, instead of telling a store."""

    def forget(info: ChannelInfo, index: int) -> None:
        place.forgotten.append(info.receivers[index])

    monkeypatch.setattr(sync_module, "forget_receiver", forget)


def run(call: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        try:
            return await asyncio.wait_for(call, 1000)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

    return run_in_virtual_time(main())


def test_every_engine_gets_the_learners_version(place: Place) -> None:
    async def main() -> None:
        for version in range(3):
            place.weight_version = version
            stats = await place.sync.sync(probe=version == 1)
            assert (stats.version, stats.bytes) == (version, 24 + 10)
            assert (stats.gap_mean, stats.gap_max) == ((1e-5, 1e-4) if version == 1 else (None, None))
            assert set(place.versions.values()) == {version}

    run(main())
    assert place.events.count("learner opens") == 1, "the channel stays open"
    assert len(place.channels[0].receivers) == 2


def test_an_engine_lost_in_the_middle_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(3, workers=2)
    watch_store(place, monkeypatch)
    place.acts["1 receives 0"] = lost("rollout engine 1")
    place.acts["learner sends"] = fails(TimeoutError("rollout engine 1 worker 0 did not take a bucket"), 2.0)

    async def main() -> None:
        await place.sync.sync(probe=False)
        assert place.versions == {"rollout engine 0": 0, "rollout engine 1": -1, "rollout engine 2": 0}
        assert list(place.lost) == [1]
        assert place.forgotten == ["rollout engine 1 worker 0", "rollout engine 1 worker 1"]
        place.weight_version = 1
        await place.sync.sync(probe=False)

    run(main())
    assert place.versions == {"rollout engine 0": 1, "rollout engine 1": -1, "rollout engine 2": 1}
    assert [len(channel.receivers) for channel in place.channels] == [6, 4], "a channel without the lost one"
    assert place.channels[0].name != place.channels[1].name


def test_an_engine_that_is_late_is_given_up(place: Place) -> None:
    place.acts["0 receives 0"] = lost("rollout engine 0", "no answer within 5 s", after_s=5.0)
    run(place.sync.sync(probe=False))
    assert "no answer within 5 s" in str(place.lost[0])
    assert place.versions["rollout engine 1"] == 0


def test_what_an_engine_raises_is_told_with_its_name(place: Place) -> None:
    place.acts["1 receives 0"] = fails(KeyError("no parameter for model.norm.weight"))
    run(place.sync.sync(probe=False))
    assert "rollout engine 1 worker 0 was lost while receiving weights" in str(place.lost[1])
    assert "model.norm.weight" in str(place.lost[1])


def test_an_engine_lost_while_a_channel_is_opened_gets_nothing(place: Place) -> None:
    place.acts["0 opens"] = lost("rollout engine 0")
    run(place.sync.sync(probe=False))
    assert list(place.lost) == [0]
    assert place.versions == {"rollout engine 0": -1, "rollout engine 1": 0}
    assert place.events.count("learner opens") == 2


def test_a_plan_that_does_not_fit_ends_the_run(place: Place) -> None:
    place.acts["1 opens"] = fails(ValueError(f"{REFUSAL} rollout engine 1; nothing was sent: 1 of 2 tensors unknown"))
    with pytest.raises(ValueError, match="1 of 2 tensors unknown"):
        run(place.sync.sync(probe=False))
    assert place.lost == {}
    assert set(place.versions.values()) == {-1}, "untouched"


@pytest.mark.parametrize("when", ["learner opens", "learner sends"])
def test_a_fault_of_the_learner_ends_the_run_at_once_with_its_reason(place: Place, when: str) -> None:
    place.acts[when] = fails(ModuleNotFoundError("No module named 'cupy'"))
    for index in (0, 1):
        place.acts[f"{index} opens" if when == "learner opens" else f"{index} receives 0"] = hangs

    async def main() -> float:
        with pytest.raises(ModuleNotFoundError, match="cupy"):
            await place.sync.sync(probe=False)
        return asyncio.get_running_loop().time()

    assert run(main()) < 1.0
    assert place.lost == {}


def test_a_learner_that_says_why_it_was_lost_is_heard(place: Place) -> None:
    place.acts["learner sends"] = fails(LearnerLost("learner rank 1", "sending its weights", "out of memory"))
    place.acts["0 receives 0"] = place.acts["1 receives 0"] = hangs
    with pytest.raises(LearnerLost, match="learner rank 1 was lost while sending its weights: out of memory"):
        run(place.sync.sync(probe=False))


@pytest.mark.parametrize("learner", [hangs, fails(LearnerLost("learner rank 0", "sending its weights", "gone"), 3.0)])
def test_a_store_that_nobody_serves_means_a_lost_learner(
    place: Place, monkeypatch: pytest.MonkeyPatch, learner: Act
) -> None:
    def unreachable(info: ChannelInfo, index: int) -> None:
        raise TimeoutError("learner rank 0 did not let us in to its store within 5 s")

    async def ends_in_time() -> None:  # as the learner's own timeout does
        with suppress(TimeoutError):
            await asyncio.wait_for(learner(), 15)
        raise LearnerLost("learner rank 0", "sending its weights", "no answer within 15 s")

    monkeypatch.setattr(sync_module, "forget_receiver", unreachable)
    place.acts["learner sends"] = ends_in_time
    place.acts["0 receives 0"] = fails(ConnectionError("learner rank 0 does not answer"))
    with pytest.raises(LearnerLost, match="learner rank 0 was lost while sending its weights"):
        run(place.sync.sync(probe=False))


def test_a_sender_that_failed_because_of_lost_engines_says_so(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.acts["0 receives 0"] = lost("rollout engine 0")
    place.acts["learner sends"] = fails(ConnectionError("NCCL lost a rank"), 1.0)
    with caplog.at_level(logging.WARNING):
        run(place.sync.sync(probe=False))
    assert "learner rank 0 could not go on without the engines that were lost: NCCL lost a rank" in caplog.text


def test_a_new_engine_alone_gets_the_version_of_the_others(place: Place) -> None:
    async def main() -> None:
        place.acts["1 receives 0"] = lost("rollout engine 1")
        await place.sync.sync(probe=False)
        place.start_anew(1)
        place.events.clear()
        await place.sync.bring_up(1)

    run(main())
    assert [event for event in place.events if "receives" in event] == ["1 receives 0"]
    assert set(place.versions.values()) == {0}


def test_where_the_learner_is_ahead_all_engines_get_its_version(place: Place) -> None:
    async def main() -> None:
        await place.sync.sync(probe=False)
        place.weight_version = 3
        place.start_anew(1)
        await place.sync.bring_up(1)

    run(main())
    assert place.versions == {"rollout engine 0": 3, "rollout engine 1": 3}, "never a mixture"


def test_syncs_take_place_one_at_a_time_and_hold_turn_and_engines(place: Place) -> None:
    async def computes() -> float:
        await asyncio.sleep(0.05)
        async with place.turns("learner"), place.locks[0]:
            return asyncio.get_running_loop().time()

    async def main() -> tuple[Any, ...]:
        return await asyncio.gather(place.sync.sync(probe=False), place.sync.sync(probe=False), computes())

    *_, computed_at = run(main())
    sends = [event for event in place.events if "sends" in event or "receives" in event]
    assert sends == ["learner sends", "0 receives 0", "1 receives 0"] * 2
    assert computed_at >= 0.2, "after the first sync, which opens and sends"
    assert not any(lock.locked() for lock in place.locks.values())


@pytest.mark.parametrize("gap", [0.0011, float("nan")])
def test_a_probe_beyond_the_tolerance_stops_the_run(place: Place, gap: float) -> None:
    place.weight_version, place.gaps = 4, (gap, 2.5)
    with pytest.raises(ParityError, match=r"after the sync to version 4 .* \(largest 2\.5\), more than .* 0\.001"):
        run(place.sync.sync(probe=True))


def test_a_probe_is_not_asked_for_unless_it_is_due(place: Place) -> None:
    place.gaps = (9.0, 9.0)
    run(place.sync.sync(probe=False))
    assert "probe" not in place.events


ONE, MANY = 1, 3


@pytest.mark.parametrize(
    ("wanted", "has_gpus", "num_hosts", "kind"),
    [
        ("auto", False, ONE, "shared_memory"),
        ("auto", False, MANY, "gloo"),
        ("auto", True, ONE, "nccl"),
        ("auto", True, MANY, "nccl"),
        ("gloo", True, MANY, "gloo"),
        ("gloo", False, ONE, "gloo"),
        ("shared_memory", True, ONE, "shared_memory"),
        ("nccl", True, MANY, "nccl"),
    ],
)
def test_which_transport_is_used(wanted: str, has_gpus: bool, num_hosts: int, kind: str) -> None:
    assert transport_kind(wanted, has_gpus=has_gpus, num_hosts=num_hosts) == kind


@pytest.mark.parametrize(
    ("wanted", "has_gpus", "num_hosts", "message"),
    [
        ("shared_memory", False, MANY, "the cluster has 3 hosts; use gloo or auto"),
        ("nccl", False, ONE, "there is no GPU; use shared_memory, gloo or auto"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(wanted: str, has_gpus: bool, num_hosts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transport_kind(wanted, has_gpus=has_gpus, num_hosts=num_hosts)
