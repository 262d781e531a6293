"""Measure a weight sync between two processes of this host: speed of the transport, of the whole sync, and its memory.

    python tools/bench_sync.py --parameters 135M,0.5B,1.5B --transport shared_memory --json out.json

    Learner (a process)                        Engine (another): vLLM, as a rollout actor has it
    random tensors ─ Publisher ── buckets ──►  1. start, load, finish, flush: the whole sync
                                               2. the same buckets, received and released: the transport
    3. a copy of the tensors into memory of    4. start, load, finish, from tensors in the engine's own memory:
       its own: what 2 is compared with           what 1 is compared with

The models have the shapes of SmolLM2-135M and Qwen2.5-0.5B and -1.5B in bf16, and random weights: nothing is read from
disk but a config. All times are medians. Memory is what a process has at most, from before the channel is opened to
after the last sync, above what it had then; the two buckets that each side holds are part of it, and so is what
malloc keeps for later. Needs about five times the size of a model, in all.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from opd.config import RolloutConfig
from opd.device import HostProfile
from opd.rollout.engine import StudentEngine
from opd.weight_sync.channel import SLOTS, ChannelInfo, TransportKind, init_info
from opd.weight_sync.plan import SyncPlan, TensorSpec, make_plan
from opd.weight_sync.publish import Publisher

if TYPE_CHECKING:
    from torch import Tensor

WARM_UP = 4
"""Rounds that are left out: until then malloc still asks the kernel for memory."""
ROUNDS = 5
START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
GB, MIB = 10**9, 2**20
QUIET_CORES = 0.15
"""Where other processes used more cores than this, the times say little."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "135M": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}
SHARED_CONFIG: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was found for one model."""

    parameters: str
    transport: TransportKind
    tensor_gb: float
    bucket_mib: float
    transport_gb_per_s: float
    copy_gb_per_s: float
    sync_s: float
    load_s: float
    fp32_head_s: float
    """What a rollout engine on a CPU does after a sync, and is in neither of the two: an fp32 copy of the new head."""
    learner_peak_buckets: float
    engine_peak_buckets: float
    load_peak_buckets: float
    """The same of the plain load, above the engine with those tensors: what vLLM itself needs, without a channel."""
    stages: Mapping[str, Mapping[str, float]]
    """`sync` and `load` → stage → seconds in the engine's process."""
    seconds: Mapping[str, list[float]]
    """Of every round."""
    foreign_cores: float
    """That other processes used meanwhile."""

    @property
    def transport_ratio(self) -> float:
        """Transport by plain copy: higher is better, 1 is as fast."""
        return self.transport_gb_per_s / self.copy_gb_per_s

    @property
    def sync_ratio(self) -> float:
        """Whole sync by plain load: lower is better, 1 is as fast."""
        return self.sync_s / self.load_s


class Memory:
    """This process's peak memory above a mark."""

    def __init__(self) -> None:
        self._steady_bytes = 0

    def mark(self) -> None:
        """Begin here, with no freed memory in hand that could hide what is needed later."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        self._steady_bytes = self._read("VmRSS")

    def peak_bytes(self) -> int:
        """Give how far it rose above the mark since then."""
        return self._read("VmHWM") - self._steady_bytes

    @staticmethod
    def _read(field: str) -> int:
        found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None, f"/proc/self/status has no {field}"
        return int(found[1]) * 1024


class Learner(Memory):
    """The sending side: random weights, and the store."""

    def __init__(self, folder: str) -> None:
        import torch
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        torch.manual_seed(0)
        self._weights: dict[str, Tensor] = {
            name: torch.empty(p.shape, dtype=p.dtype).uniform_(-0.1, 0.1) for name, p in model.named_parameters()
        }
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._publisher = Publisher()

    def describe(self) -> tuple[int, list[TensorSpec]]:
        """Give the port of the store, and what will be sent."""
        specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self._weights.items()]
        return self._store.port, specs

    def open(self, channel: ChannelInfo, plan: SyncPlan) -> None:
        """Open the channel."""
        self._publisher.open(channel, plan)

    def send(self) -> float:
        """Send everything; give the seconds until the engine has let go of it."""
        started = time.perf_counter()
        self._publisher.send(self._weights.items())
        return time.perf_counter() - started

    def checksum(self) -> int:
        """Give the sum of all weights, read as whole numbers."""
        import torch

        return sum(int(t.view(-1).view(torch.int16).sum(dtype=torch.int64)) for t in self._weights.values())

    def copy(self) -> list[float]:
        """Give the seconds of copies of all tensors into memory that has been written to before."""
        import torch

        copies = [torch.zeros_like(tensor) for tensor in self._weights.values()]
        seconds = []
        for _ in range(WARM_UP + ROUNDS):
            started = time.perf_counter()
            for copy, tensor in zip(copies, self._weights.values(), strict=True):
                copy.copy_(tensor)
            seconds.append(time.perf_counter() - started)
        return seconds[WARM_UP:]


def timed(**stages: Callable[[], object]) -> dict[str, float]:
    """Carry out stages one after another; give the seconds of each."""
    seconds = {}
    for name, stage in stages.items():
        started = time.perf_counter()
        stage()
        seconds[name] = time.perf_counter() - started
    return seconds


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Give the median of each stage."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


class _DummyStudent(StudentEngine):
    """Loads random weights, so that no file must be written for it."""

    def _engine_args(self) -> dict[str, Any]:
        return {**super()._engine_args(), "load_format": "dummy"}


class Engine(Memory):
    """The receiving side: a rollout engine as its actor has it."""

    def __init__(self, folder: str, vocab_size: int, profile: HostProfile) -> None:
        super().__init__()
        config = RolloutConfig(max_new_tokens=32, max_running=4, max_batched_tokens=64, kv_cache_gib=0.05)
        self._student = _DummyStudent(config, "bf16", folder, vocab_size, [0], 64, profile, 0)
        self._student.ready()
        self._tensors: dict[str, Tensor] = {}

    def open(self, init: Mapping[str, Any]) -> None:
        """Open the channel."""
        self._student.open_channel(init)

    def sync(self) -> dict[str, float]:
        """Take in weights, up to an engine that may answer again; give the seconds of each stage."""
        vllm = self._student._vllm
        return timed(
            start=lambda: vllm.call_workers("start_weight_update"),
            receive_and_load=lambda: vllm.call_workers("update_weights", {"version": 1}),
            finish=lambda: vllm.call_workers("finish_weight_update"),
            flush=vllm.forget_prefixes,
        )

    def fp32_head(self) -> float:
        """Give the seconds in which the head is copied to fp32."""
        started = time.perf_counter()
        self._student._weights_are_new()
        return time.perf_counter() - started

    def drain(self, read: bool) -> int:
        """Receive and release all buckets; give the checksum of what was in them if it shall be read."""
        import torch

        transfer = self._worker().weight_transfer_engine
        receiver, plan = transfer._receiver, transfer._plan
        total = 0
        for number, bucket in enumerate(plan.buckets):
            data = receiver.receive(plan.filled(number), plan.filled(number + 1))
            if read:
                parts = (data[p.bucket_offset : p.bucket_offset + p.nbytes].view(torch.int16) for p in bucket)
                total += sum(int(part.sum(dtype=torch.int64)) for part in parts)
            receiver.release()
        return total

    def load(self, specs: Sequence[TensorSpec]) -> tuple[list[dict[str, float]], int]:
        """Load tensors that are in the engine's memory; give the seconds of each stage, and the peak in bytes."""
        import torch
        from vllm.config import set_current_vllm_config

        tensors = {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)).fill_(0.1) for s in specs}
        worker = self._worker()
        transfer = worker.weight_transfer_engine

        def load() -> None:
            with set_current_vllm_config(worker.vllm_config):
                transfer._loaded |= transfer.model.load_weights(tensors.items())

        self.mark()
        rounds = [
            timed(start=worker.start_weight_update, load=load, finish=worker.finish_weight_update)
            for _ in range(WARM_UP + ROUNDS)
        ]
        return rounds[WARM_UP:], self.peak_bytes()

    def _worker(self) -> Any:
        (worker,) = self._student._vllm._engine.collective_rpc(lambda worker: worker)
        return worker


def serve(pipe: Connection, cls: Callable[..., Any], args: Sequence[Any]) -> None:
    """Make an object and carry out calls to it; runs in a process of its own."""
    try:
        served = cls(*args)
    except Exception as error:  # noqa: BLE001 - raised in the process that waits
        traceback.print_exc()
        pipe.send(RuntimeError(f"starting: {error!r}"))
        return
    pipe.send(None)
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            pipe.send(getattr(served, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - raised in the process that waits
            traceback.print_exc()
            pipe.send(RuntimeError(f"{method}: {error!r}"))


class Remote:
    """An object in a process of its own."""

    def __init__(self, cls: Callable[..., Any], *args: Any, env: Mapping[str, str]) -> None:
        self._name = cls.__name__
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, cls, args), daemon=True)
        with environment(env):
            self._process.start()
        theirs.close()

    def begin(self, method: str, *args: Any) -> None:
        """Have it carry out a call."""
        self._pipe.send((method, args))

    def answer(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Give what the call returned; the first answer says that it has started.

        Raises:
            TimeoutError: there was no answer in time.
            RuntimeError: it failed there, or the process died.
        """
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{self._name} gave no answer within {timeout_s:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(CALL_TIMEOUT_S)
            raise RuntimeError(f"{self._name}'s process ended with {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self._name}: {answer}") from answer
        return answer

    def call(self, method: str, *args: Any) -> Any:
        """Begin a call and give its answer."""
        self.begin(method, *args)
        return self.answer()

    def cpu_s(self) -> float:
        """Give the CPU seconds that it has used."""
        return used_cpu_s(psutil.Process(self._process.pid))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def used_cpu_s(process: psutil.Process) -> float:
    """Give the CPU seconds of a process."""
    times = process.cpu_times()
    return times.user + times.system


def foreign_cpu_s(*remotes: Remote) -> float:
    """Give the CPU seconds that others than these and this process have used on the host."""
    host = psutil.cpu_times()
    busy_s = sum(host) - host.idle - host.iowait - host.steal - host.guest - host.guest_nice  # guests are in user
    return busy_s - used_cpu_s(psutil.Process()) - sum(remote.cpu_s() for remote in remotes)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have these variables set for processes that are started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(parameters: str, kind: TransportKind, bucket_bytes: int, buckets_under_way: int) -> Measurement:
    """Start both sides for one size of model, and measure."""
    profile = HostProfile.cpu(num_cpus=len(os.sched_getaffinity(0)))
    # As the actors of a run have it: both sides may use every core.
    common = {"OMP_NUM_THREADS": str(profile.num_cpus), "HF_HUB_OFFLINE": "1"}
    engine_env = {**common, **profile.engine_env, "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    sizes = MODELS[parameters]
    with tempfile.TemporaryDirectory(prefix="bench-sync-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**SHARED_CONFIG, **sizes}))
        learner = Remote(Learner, folder, env={**common, **profile.learner_env})
        engine = Remote(Engine, folder, sizes["vocab_size"], profile, env=engine_env)
        try:
            learner.answer(START_TIMEOUT_S)
            engine.answer(START_TIMEOUT_S)
            return _measure(parameters, kind, bucket_bytes, buckets_under_way, learner, engine)
        finally:
            learner.close()
            engine.close()


def _measure(
    parameters: str,
    kind: TransportKind,
    bucket_bytes: int,
    buckets_under_way: int,
    learner: Remote,
    engine: Remote,
) -> Measurement:
    port, specs = learner.call("describe")
    plan = make_plan(specs, bucket_bytes)
    channel = ChannelInfo(
        kind=kind,
        name=uuid.uuid4().hex,
        host="127.0.0.1",
        port=port,
        receivers=("engine 0 worker 0",),
        bucket_bytes=plan.bucket_bytes,
        timeout_s=CALL_TIMEOUT_S / 2,
        buckets_under_way=buckets_under_way,
    )

    def both(
        learner_method: str, engine_method: str, learner_args: Sequence[Any] = (), engine_args: Sequence[Any] = ()
    ) -> tuple[Any, Any]:
        """Have both sides work at the same time."""
        engine.begin(engine_method, *engine_args)
        learner.begin(learner_method, *learner_args)
        return learner.answer(), engine.answer()

    began, foreign_s = time.perf_counter(), foreign_cpu_s(learner, engine)
    both("mark", "mark")
    both("open", "open", (channel, plan), (init_info(channel, plan, first_receiver=0),))
    syncs, sync_stages = [], []
    for _ in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        _, stages = both("send", "sync")
        syncs.append(time.perf_counter() - started)
        sync_stages.append(stages)
    peaks = both("peak_bytes", "peak_bytes")
    heads = [engine.call("fp32_head") for _ in range(ROUNDS)]

    _, received = both("send", "drain", (), (True,))
    if received != (sent := learner.call("checksum")):
        raise RuntimeError(f"the engine received weights with checksum {received}, sent were {sent}")
    drains = []
    for _ in range(WARM_UP + ROUNDS):
        seconds, _ = both("send", "drain", (), (False,))
        drains.append(seconds)

    loads, load_peak = engine.call("load", specs)
    seconds = {
        "sync": syncs[WARM_UP:],
        "transport": drains[WARM_UP:],
        "copy": learner.call("copy"),
        "load": [sum(stages.values()) for stages in loads],
        "fp32_head": heads,
    }
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return Measurement(
        parameters=parameters,
        transport=kind,
        tensor_gb=plan.total_bytes / GB,
        bucket_mib=plan.bucket_bytes / MIB,
        transport_gb_per_s=plan.total_bytes / GB / median["transport"],
        copy_gb_per_s=plan.total_bytes / GB / median["copy"],
        sync_s=median["sync"],
        load_s=median["load"],
        fp32_head_s=median["fp32_head"],
        learner_peak_buckets=peaks[0] / plan.bucket_bytes,
        engine_peak_buckets=peaks[1] / plan.bucket_bytes,
        load_peak_buckets=load_peak / plan.bucket_bytes,
        stages={"sync": medians(sync_stages[WARM_UP:]), "load": medians(loads)},
        seconds=seconds,
        foreign_cores=max(0.0, foreign_cpu_s(learner, engine) - foreign_s) / (time.perf_counter() - began),
    )


def table(results: Sequence[Measurement]) -> str:
    """Lay the results out as one Markdown table."""
    lines = [
        "| parameters | GB | transport | GB/s | plain copy GB/s | ratio | sync s | load s | ratio | "
        "learner peak, buckets | engine peak, buckets | plain load peak, buckets |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.parameters} | {r.tensor_gb:.2f} | {r.transport} | {r.transport_gb_per_s:.2f} | {r.copy_gb_per_s:.2f} | "
        f"{r.transport_ratio:.2f} | {r.sync_s:.3f} | {r.load_s:.3f} | {r.sync_ratio:.2f} | "
        f"{r.learner_peak_buckets:.2f} | {r.engine_peak_buckets:.2f} | "
        f"{r.load_peak_buckets:.2f} |"
        for r in results
    ]
    lines += ["", f"Medians of {ROUNDS}. Peaks: above what the process had before the channel was opened."]
    for r in results:
        if r.foreign_cores > QUIET_CORES:
            lines.append(f"{r.parameters}: others used {r.foreign_cores:.1f} cores; measure again on an idle machine.")
        for what, stages in r.stages.items():
            lines.append(f"{r.parameters}, {what}: " + ", ".join(f"{name} {s:.3f} s" for name, s in stages.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def models(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(MODELS):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
        return names

    parser.add_argument("--parameters", type=models, default=list(MODELS), help="comma-separated: 135M, 0.5B, 1.5B")
    parser.add_argument("--transport", choices=["shared_memory", "gloo"], default="shared_memory")
    parser.add_argument("--bucket-mib", type=int, default=64, help="as weight_sync.bucket_mib")
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="fill a bucket while the last one is taken, as on unshared cores",
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    results = []
    for name in args.parameters:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(measure(name, args.transport, args.bucket_mib * MIB, SLOTS if args.overlap else 1))
    print(table(results))
    if args.json:
        rows = [{**asdict(r), "transport_ratio": r.transport_ratio, "sync_ratio": r.sync_ratio} for r in results]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
