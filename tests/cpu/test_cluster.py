"""Real Ray: who is named when something is lost, what actors are given, and that nothing outlives a session."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from opd.cluster import await_call, kill, ray_session, spawn
from opd.device import HostProfile
from opd.errors import WorkerLost

CPU = HostProfile.cpu(num_cpus=2)
ENV = {"OPD_TEST": "seen"}


class Worker:
    def pid(self) -> int:
        return os.getpid()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def fail(self) -> None:
        print("a line before the end", file=sys.stderr, flush=True)
        raise TimeoutError("the worker's own")

    def crash(self) -> None:
        print("a line before the end", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def children(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid


@pytest.fixture(scope="module")
def session() -> Iterator[Path]:
    with ray_session(CPU) as logs:
        yield logs


def on_worker(*calls: tuple[Any, ...], timeout_s: float = 30.0, whom: str = "test worker") -> list[Any]:
    """Call methods of a new worker in turn."""

    async def main() -> list[Any]:
        actor = await spawn(Worker, whom=whom, env=ENV, threads=2)
        try:
            return [
                await await_call(
                    getattr(actor, method).remote(*args), whom=whom, what=f"doing {method}", timeout_s=timeout_s
                )
                for method, *args in calls
            ]
        finally:
            kill(actor)
            kill(actor)  # of a dead one: nothing happens

    return asyncio.run(main())


def test_an_actor_gets_its_environment_and_threads(session: Path) -> None:
    (environment,) = on_worker(("environment",))
    assert environment["OPD_TEST"] == "seen"
    assert environment["OMP_NUM_THREADS"] == "2"


def test_what_the_actor_raises_comes_as_it_is_with_a_note(session: Path) -> None:
    with pytest.raises(TimeoutError, match="the worker's own") as error:
        on_worker(("fail",))
    assert type(error.value) is TimeoutError
    (note,) = error.value.__notes__
    assert "raised in test worker, while doing fail" in note
    assert "in fail" in note, "the actor's own traceback"


def test_a_dead_actor_is_named_with_its_last_lines(session: Path) -> None:
    with pytest.raises(WorkerLost) as error:
        on_worker(("crash",))
    assert str(error.value).startswith("test worker was lost while doing crash: after ")
    assert "worker process has died" in error.value.reason
    assert "    | a line before the end" in error.value.reason


def test_an_actor_that_takes_too_long_is_named(session: Path) -> None:
    with pytest.raises(WorkerLost, match=r"test worker was lost while doing sleep: no answer after 0.5 s"):
        on_worker(("sleep", 20), timeout_s=0.5)


def test_resources_that_the_cluster_has_not_got_are_told_at_once(session: Path) -> None:
    async def main() -> None:
        await spawn(Worker, whom="learner rank 3", env={}, threads=1, num_gpus=2)

    with pytest.raises(ValueError, match="learner rank 3 asks for 2 GPU where the cluster has 0"):
        asyncio.run(main())


def test_resources_that_are_taken_are_told_in_time(session: Path) -> None:
    async def main() -> None:
        first = await spawn(Worker, whom="first", env={}, threads=1, num_cpus=2)
        try:
            await spawn(Worker, whom="second", env={}, threads=1, num_cpus=1, timeout_s=2.0)
        finally:
            kill(first)

    with pytest.raises(
        WorkerLost, match=r"(?s)second was lost while starting: no answer after 2 s.*1 CPU, 0 of 2 free"
    ):
        asyncio.run(main())


def test_worker_lost_can_be_pickled() -> None:
    import pickle

    lost = pickle.loads(pickle.dumps(WorkerLost("engine 0", "scoring", "it died")))
    assert str(lost) == "engine 0 was lost while scoring: it died"


DRIVER = """
import asyncio, signal
from opd.cluster import await_call, ray_session, spawn
from opd.device import HostProfile
from tests.cpu.test_cluster import Worker

async def main():
    actor = await spawn(Worker, whom="worker", env={}, threads=1)
    call = lambda method, *a: await_call(getattr(actor, method).remote(*a), whom="worker", what=method, timeout_s=30)
    await call("children")
    busy = actor.sleep.remote(4.0)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    print("ready", flush=True)
    await stop.wait()
    print("interrupted:", await await_call(busy, whom="worker", what="sleep", timeout_s=30), flush=True)
    print("still serving:", await call("pid") > 0, flush=True)

with ray_session(HostProfile.cpu(num_cpus=1)):
    asyncio.run(main())
"""


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Two drivers at once, each with a session and an actor, in process groups of their own like a shell's jobs."""
    command = [sys.executable, "-c", DRIVER]
    started = [
        subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        for _ in range(2)
    ]
    try:
        for driver in started:
            assert driver.stdout is not None
            seen = []
            while not (line := driver.stdout.readline()).startswith("ready"):
                seen.append(line)
                assert line, "".join(seen)
        yield started
    finally:
        for driver in started:
            driver.kill()
            driver.wait()


def of_session(driver: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes that the driver has started, directly or not; all have its session id."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == driver.pid and process.pid != driver.pid:
                found.append(process)
        except ProcessLookupError:
            continue
    return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[str]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{p.pid} {p.name()}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_nothing_outlives_a_killed_driver(drivers: list[subprocess.Popen[str]]) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    first, second = drivers
    processes = of_session(first)
    assert len(processes) > 5
    first.kill()
    first.wait()
    assert wait_until_gone(processes, 20) == []
    assert set(os.listdir("/dev/shm")) <= shared_before
    # The other session has not noticed.
    os.killpg(second.pid, signal.SIGINT)
    output, _ = second.communicate(timeout=40)
    assert "still serving: True" in output


def test_an_interrupt_reaches_the_driver_alone(drivers: list[subprocess.Popen[str]]) -> None:
    for driver in drivers:
        processes = of_session(driver)
        os.killpg(driver.pid, signal.SIGINT)
        output, _ = driver.communicate(timeout=40)
        assert output.splitlines() == ["interrupted: rested", "still serving: True"]
        assert driver.returncode == 0
        assert wait_until_gone(processes, 5) == []
