"""Ray: a session that leaves nothing behind, actors with the environment they need, calls that say who failed.

Seen with Ray 2.60: daemons start with SIGINT blocked, workers inherit that, and actors get process groups of their
own. So Ctrl-C in a terminal reaches the driver alone, and actors go on serving it while it stops. The daemons die with
the driver through prctl, and the workers with them; but two agents first try for a minute to report the death of the
daemons: see `_Watchdog`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray import ObjectRef
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.actor import ActorHandle
from ray.exceptions import ActorHandleNotFoundError, RayActorError, RayTaskError

from opd.device import HostProfile
from opd.errors import WorkerLost

T = TypeVar("T")

OBJECT_STORE_BYTES = 2**30
LOG_LINES_SHOWN = 15
ANSI_COLOUR = re.compile(r"\x1b\[\d+m")


class _Watchdog:
    """A shell that outlives this process just long enough to kill Ray's agents, should this process be killed."""

    def __init__(self) -> None:
        # Only daemons that live as long as the session, so that no number can belong to another process by then.
        daemons = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "agent" in " ".join(child.cmdline()).lower():
                    daemons.append(str(child.pid))
        # `read` returns when the other end of the pipe is closed, which the kernel does however this process ends.
        script = 'read _; kill -9 "$@" 2>/dev/null'
        command = ["sh", "-c", script, "opd-watchdog", *daemons]
        self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """End the shell without killing anything."""
        self._shell.kill()
        self._shell.communicate()


@contextmanager
def ray_session(profile: HostProfile) -> Iterator[Path]:
    """Start Ray on this host, give the folder of its logs, and end it and all its processes on the way out.

    Several sessions can live on one host. With `RAY_ADDRESS` set, that cluster is used instead of a local one.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; unset, it warns
    address = os.environ.get("RAY_ADDRESS", "local")
    local: dict[str, Any] = {}
    if address == "local":
        local = {"num_cpus": profile.num_cpus, "num_gpus": profile.num_gpus, "object_store_memory": OBJECT_STORE_BYTES}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **local)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end this process without a checkpoint
        watchdog = _Watchdog()
        try:
            yield _logs_folder()
        finally:
            ray.shutdown()
            watchdog.dismiss()
    finally:
        ray.shutdown()  # after an init that failed half-way; nothing to do otherwise


async def spawn(
    cls: type,
    args: Sequence[Any] = (),
    *,
    whom: str,
    env: Mapping[str, str],
    threads: int,
    num_cpus: float = 0,
    num_gpus: float = 0,
    timeout_s: float = 120.0,
) -> ActorHandle:
    """Give an actor of `cls` that runs; its constructor should be quick, since `timeout_s` bounds placement and it.

    Args:
        args: Of the constructor.
        whom: Names the actor in messages.
        env: Its environment, besides the driver's.
        threads: Of its OpenMP pools; Ray would set them to `num_cpus`.
        num_cpus: Cores that it reserves; 0, since learner and engines take turns on the same cores.
        num_gpus: GPUs that it reserves.
        timeout_s: Longest wait until it runs.

    Raises:
        ValueError: The cluster has not got what is asked for.
        WorkerLost: It did not run in time.
    """
    wanted = {"CPU": num_cpus, "GPU": num_gpus}
    total = ray.cluster_resources()
    if short := [name for name, count in wanted.items() if count > total.get(name, 0.0)]:
        asked = ", ".join(f"{wanted[n]:g} {n} where the cluster has {total.get(n, 0.0):g}" for n in short)
        raise ValueError(f"{whom} asks for {asked}; ask for less, or start a larger cluster")
    env = {"OMP_NUM_THREADS": str(threads), **env}
    ray_remote: Any = ray.remote  # Any: its stubs do not know these options
    actor_class = ray_remote(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_restarts=0,
        runtime_env={"env_vars": env},
    )
    actor: ActorHandle = actor_class(cls).remote(*args)
    try:
        await await_call(actor.__ray_ready__.remote(), whom=whom, what="starting", timeout_s=timeout_s)
    except BaseException as error:
        free = ray.available_resources()
        kill(actor)
        if isinstance(error, WorkerLost):
            resources = [f"{c:g} {n}, {free.get(n, 0.0):g} of {total.get(n, 0.0):g} free" for n, c in wanted.items()]
            raise WorkerLost(whom, error.what, f"{error.reason}\n(it asked for {'; '.join(resources)})") from None
        raise
    return actor


def num_hosts() -> int:
    """Give how many hosts the session has."""
    return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


def kill(actor: ActorHandle) -> None:
    """End an actor at once; fine for one that is dead already."""
    try:
        ray.kill(actor)
    except ActorHandleNotFoundError:  # it belonged to a session that has ended, and ended with it
        return


async def await_call(ref: ObjectRef[T], *, whom: str, what: str, timeout_s: float) -> T:
    """Give what a call to an actor returns; `what` is a phrase as "scoring 12 samples".

    Raises:
        WorkerLost: The actor died, or gave no answer within `timeout_s`.
        Exception: What the actor's own code raised, unchanged, with a note that names the actor.
    """
    started = time.monotonic()
    answer = asyncio.ensure_future(_awaited(ref))
    try:
        # Not wait_for: its TimeoutError could not be told from one that the actor's code raised.
        done, _ = await asyncio.wait({answer}, timeout=timeout_s)
    finally:
        answer.cancel()
    if not done:
        raise WorkerLost(whom, what, f"no answer after {timeout_s:g} s{_last_log_lines(ref)}")
    try:
        return answer.result()
    except RayTaskError as error:
        # Ray raises a class made of both errors, which has not got the attributes of either.
        error.cause.add_note(f"raised in {whom}, while {what}:\n{ANSI_COLOUR.sub('', str(error))}")
        raise error.cause from None
    except RayActorError as error:
        waited_s = time.monotonic() - started
        reason = " ".join(str(error).split())
        raise WorkerLost(whom, what, f"after {waited_s:.1f} s: {reason}{_last_log_lines(ref)}") from None


async def _awaited(ref: Awaitable[T]) -> T:
    return await ref


def _logs_folder() -> Path:
    """Give the folder where this host's Ray processes write their output."""
    assert ray_worker._global_node is not None
    return Path(ray_worker._global_node.get_logs_dir_path())


def _last_log_lines(ref: ObjectRef[Any]) -> str:
    """Give the last lines that the actor behind `ref` wrote, on this host; empty when there are none."""
    try:
        # Ray has no public way from an actor to its log that works without the dashboard.
        pid = ray_state.actors(ref.task_id().actor_id().hex())["Pid"]
        files = [file for kind in ("err", "out") for file in _logs_folder().glob(f"worker-*-{pid}.{kind}")]
        texts = [[line for line in file.read_text(errors="replace").splitlines() if line.strip()] for file in files]
    except Exception as error:  # noqa: BLE001 - private calls: the message matters more than its log lines
        return f"\n(its log could not be read: {error!r})"
    lines = next((text[-LOG_LINES_SHOWN:] for text in texts if text), [])
    return "".join(f"\n    | {line}" for line in lines)
