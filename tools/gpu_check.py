"""What no test on a CPU can cover: the weight sync on an NVIDIA GPU. Under 8 minutes on one, no network, no model.

    python tools/gpu_check.py            # a random Qwen3 of 0.6 B parameters
    python tools/gpu_check.py --tiny     # a few MB; runs without a GPU too, then without the NCCL parts

    learner (this process, GPU 0) ──── bucket channel ────► vLLM engine (another process, the last GPU)

1. NCCL through cupy: our communicator alone on a GPU (NCCL refuses two ranks on one), and a broadcast through it.
2. Shared memory and gloo: tensors on the GPU into a running engine, which then must answer as transformers does.
3. NCCL from GPU to GPU into the engine, where there are two.

Prints a table; ends with 1 when a check failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import Qwen3Config, Qwen3ForCausalLM

from opd.device import HostProfile
from opd.weight_sync.channel import ChannelInfo, TransportKind, init_info
from opd.weight_sync.plan import SyncPlan, TensorSpec, make_plan
from opd.weight_sync.publish import Publisher

TIMEOUT_S = 60.0
START_TIMEOUT_S = 240.0
BUCKET_BYTES = 64 * 2**20
GAP_MEAN = 0.05
"""Nats: mean gap allowed between a bf16 engine and fp32 transformers on the same bf16 weights."""
PROMPT = [(7 * i * i + 3) % 500 for i in range(64)]
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of the table."""

    check: str
    passed: bool
    note: str


def make_model(folder: Path, *, tiny: bool, seed: int) -> Qwen3ForCausalLM:
    """Write a random Qwen3 in bf16 into `folder`, and give it on the CPU."""
    torch.manual_seed(seed)
    width, layers, vocab = (128, 2, 512) if tiny else (1024, 28, 151936)
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64 if tiny else 128,
        vocab_size=vocab,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=1,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def reference(model: Qwen3ForCausalLM, device: str) -> Tensor:
    """Give the log-probability of every id of the prompt but the first, in fp32."""
    exact: Any = Qwen3ForCausalLM(model.config)
    exact.load_state_dict(model.state_dict())
    exact.eval().to(device=device, dtype=torch.float32)
    with torch.no_grad():
        logits = exact(torch.tensor([PROMPT], device=device)).logits[0, :-1]
    return logits.log_softmax(-1).cpu().gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def run_engine(pipe: Connection, folder: str, gpu: str | None) -> None:
    """Serve a vLLM engine through a pipe; runs in a process of its own."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    profile = HostProfile.detect()
    os.environ.update(profile.engine_env, VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams, TokensPrompt

    from opd.weight_sync.vllm_plugin import register

    register()
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        logprobs_mode="raw_logprobs",
        weight_transfer_config={"backend": "opd"},
        **{"enforce_eager": True, **profile.engine_kwargs(kv_cache_gib=0.1, gpu_memory_utilization=0.3)},
    )

    def score(_: object) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        out = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], params, use_tqdm=False)[0]
        assert out.prompt_logprobs is not None
        return [row[i].logprob for row, i in zip(out.prompt_logprobs[1:], PROMPT[1:], strict=True) if row]

    def open_channel(info: object) -> None:
        llm.collective_rpc("init_weight_transfer_engine", args=(info,))

    def receive(version: object) -> None:
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", args=({"version": version},))
        llm.collective_rpc("finish_weight_update")
        llm.reset_prefix_cache()

    actions: dict[str, Callable[[object], object]] = {"score": score, "open": open_channel, "receive": receive}
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        name, argument = command
        try:
            pipe.send(actions[name](argument))
        except Exception as error:  # noqa: BLE001 - for the other process to raise
            traceback.print_exc()
            pipe.send(RuntimeError(f"{name}: {error!r}"))


class Engine:
    """The engine's process, seen from here."""

    def __init__(self, folder: Path, gpu: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(theirs, str(folder), gpu), daemon=True)
        self._process.start()
        theirs.close()
        self.answer(START_TIMEOUT_S)

    def ask(self, name: str, argument: object = None) -> None:
        """Have it do something."""
        self._pipe.send((name, argument))

    def answer(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Give what it says to the last `ask`, or raise what went wrong there."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the engine gave no answer within {timeout_s:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


def channel(kind: TransportKind, plan: SyncPlan, store: TCPStore, *receivers: str) -> ChannelInfo:
    return ChannelInfo(
        kind=kind,
        name=uuid.uuid4().hex,
        host="127.0.0.1",
        port=store.port,
        receivers=receivers,
        bucket_bytes=plan.bucket_bytes,
        timeout_s=TIMEOUT_S,
    )


def check_communicator(plan: SyncPlan, store: TCPStore) -> str:
    """Send all weights through a communicator of one rank, and look at what the last bucket holds."""
    from opd.weight_sync.nccl import NcclSender, cupy_nccl

    sender = NcclSender(channel("nccl", plan, store))
    pattern = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(plan.bucket_bytes // 256 + 1)
    buffer = sender.buffer()
    started = time.perf_counter()
    for number in range(len(plan.buckets)):
        buffer = sender.buffer()
        buffer.copy_(pattern[: len(buffer)])
        sender.post(plan.filled(number))
    sender.finish()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    last = plan.filled(len(plan.buckets) - 1)
    if not torch.equal(buffer[:last], pattern[:last]):
        raise AssertionError("the bucket is not what was put into it")
    sender.close()
    return (
        f"NCCL {cupy_nccl().get_version()}, {len(plan.buckets)} broadcasts, {plan.total_bytes / seconds / 1e9:.1f} GB/s"
    )


def check_sync(
    kind: TransportKind,
    engine: Engine,
    plan: SyncPlan,
    versions: list[tuple[dict[str, Tensor], Tensor]],
    store: TCPStore,
) -> str:
    """Sync each version, compare what the engine says with transformers, and time a sync."""
    info = channel(kind, plan, store, "engine 0 worker 0")
    publisher = Publisher()
    engine.ask("open", init_info(info, plan, first_receiver=0))
    publisher.open(info, plan)
    engine.answer()
    seconds, gaps = [], []
    for version in range(ROUNDS):
        weights, wanted = versions[version % len(versions)]
        started = time.perf_counter()
        engine.ask("receive", version)
        publisher.send(weights.items())
        engine.answer()
        seconds.append(time.perf_counter() - started)
        engine.ask("score")
        gap = (torch.tensor(engine.answer()) - wanted).abs()
        gaps.append(gap.mean().item())
        if not gaps[-1] <= GAP_MEAN:
            raise AssertionError(f"after sync {version} the mean gap to transformers is {gaps[-1]:.3f} nats")
    publisher.close()
    return (
        f"{plan.total_bytes / 1e9:.2f} GB in {min(seconds):.2f} s, {plan.total_bytes / min(seconds) / 1e9:.1f} GB/s "
        f"loaded; mean gap {max(gaps):.4f} nats"
    )


def attempt(outcomes: list[Outcome], name: str, check: Callable[[], str]) -> None:
    """Run a check, and note what came of it."""
    started = time.perf_counter()
    try:
        passed, note = True, check()
    except Exception as error:  # noqa: BLE001 - the other checks shall run as well
        traceback.print_exc()
        passed, note = False, f"{type(error).__name__}: {error}"
    outcomes.append(Outcome(name, passed, f"{note} ({time.perf_counter() - started:.0f} s)"))
    print(f"{name}: {'ok' if passed else 'FAILED'}: {outcomes[-1].note}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of a few MB")
    args = parser.parse_args()
    num_gpus = torch.cuda.device_count()
    if not num_gpus and not args.tiny:
        parser.error("there is no GPU here; --tiny runs the rest on a CPU")
    device = "cuda" if num_gpus else "cpu"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        models = [make_model(Path(folder) / str(seed), tiny=args.tiny, seed=seed) for seed in range(2)]
        versions = [
            ({n: p.detach().to(device) for n, p in model.named_parameters()}, reference(model, device))
            for model in models[::-1]  # the engine starts with the weights of the second
        ]
        if not (moved := (versions[0][1] - versions[1][1]).abs().mean().item()) > 10 * GAP_MEAN:
            raise AssertionError(f"the two models differ by {moved:.3f} nats only; the check would show nothing")
        weights = versions[0][0]
        dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in weights.items()}
        specs = [TensorSpec(n, dtypes[n], tuple(t.shape)) for n, t in weights.items()]
        plan = make_plan(specs, 2**16 if args.tiny else BUCKET_BYTES)
        if num_gpus:
            attempt(outcomes, "nccl, one rank", lambda: check_communicator(plan, store))
        gpu = str(num_gpus - 1) if num_gpus > 1 else None
        engine = Engine(Path(folder) / "0", gpu)
        try:
            kinds: list[TransportKind] = ["shared_memory", "gloo", *(["nccl"] if num_gpus > 1 else [])]
            for kind in kinds:
                attempt(
                    outcomes, f"{kind} into vLLM", lambda kind=kind: check_sync(kind, engine, plan, versions, store)
                )
        finally:
            engine.close()
    print()
    for outcome in outcomes:
        print(f"{'ok' if outcome.passed else 'FAILED':8}{outcome.check:26}{outcome.note}")
    if num_gpus == 1:
        print("        nccl into vLLM            not run: it needs two GPUs")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
