"""Real vLLM engines on tiny random models: after a sync they compute what transformers computes on the same weights.

The engines run one after another in one child process, so that vLLM is imported once and never into pytest. The learner
is a thread of that process: what happens between processes is in `test_transport.py`.
"""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM

from opd.device import HostProfile
from opd.weight_sync.channel import ChannelInfo, TransportKind, init_info
from opd.weight_sync.plan import REFUSAL, SyncPlan, TensorSpec, make_plan
from opd.weight_sync.publish import Publisher
from tests.tiny_models import Family, make_tiny

CPU = HostProfile.cpu(num_cpus=2)
PROMPT = list(np.random.default_rng(0).integers(2, 400, size=24))
NEW_TOKENS = 8
TIMEOUT_S = 20.0


def _prepare_child() -> None:
    os.environ.update(CPU.engine_env, OMP_NUM_THREADS="2", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_child) as executor:
        yield executor


Weights = dict[str, Tensor]
Answer = tuple[list[int], list[float], list[float]]
"""Greedy ids, their log-probabilities, and those of the prompt after its first id."""


class Engine:
    """A vLLM engine, and a learner that sends to it; only in the child."""

    def __init__(self, folder: Path, *, tensor_parallel: int = 1, dtype: Any = "float32") -> None:
        from vllm import LLM

        from opd.weight_sync.vllm_plugin import register

        register()
        self.workers = tensor_parallel
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=dtype,
            tensor_parallel_size=tensor_parallel,
            max_model_len=64,
            max_num_seqs=4,
            logprobs_mode="raw_logprobs",
            weight_transfer_config={"backend": "opd"},
            disable_log_stats=True,
            seed=0,
            **CPU.engine_kwargs(kv_cache_gib=0.05, gpu_memory_utilization=0.5),
        )
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def open(self, plan: SyncPlan, kind: TransportKind = "shared_memory") -> Publisher:
        channel = ChannelInfo(
            kind=kind,
            name=uuid.uuid4().hex,
            host="127.0.0.1",
            port=self.store.port,
            receivers=tuple(f"engine 0 worker {w}" for w in range(self.workers)),
            bucket_bytes=plan.bucket_bytes,
            timeout_s=TIMEOUT_S,
        )
        publisher = Publisher()
        with _AtTheSameTime(lambda: publisher.open(channel, plan)):
            self.llm.collective_rpc("init_weight_transfer_engine", args=(init_info(channel, plan, first_receiver=0),))
        return publisher

    def receive(self, publisher: Publisher, weights: Weights) -> None:
        with _AtTheSameTime(lambda: publisher.send(weights.items())):
            self.llm.collective_rpc("start_weight_update")
            self.llm.collective_rpc("update_weights", args=({"version": 1},))
            self.llm.collective_rpc("finish_weight_update")
        self.llm.reset_prefix_cache()

    def answer(self) -> Answer:
        from vllm import SamplingParams, TokensPrompt

        # The first request leaves its prompt in the prefix cache, which the next sync must flush.
        greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        out: Any = self.llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], greedy, use_tqdm=False)[0].outputs[0]
        ids = list(out.token_ids)
        scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = self.llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], scoring, use_tqdm=False)[0].prompt_logprobs
        assert scored is not None
        return (
            ids,
            [row[i].logprob for row, i in zip(out.logprobs, ids, strict=True)],
            [row[i].logprob for row, i in zip(scored[1:], PROMPT[1:], strict=True) if row],  # the first has none
        )


class _AtTheSameTime:
    """Runs a function in a thread during the block, and raises what it raised."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:  # noqa: BLE001 - raised at the end of the block
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._thread.join(TIMEOUT_S)
            if self._error is not None:
                raise self._error


def specs(weights: Weights) -> list[TensorSpec]:
    return [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in weights.items()]


def weights_of(folder: Path) -> Weights:
    """In the learner's order: embeddings, layers, norm, head."""
    weights = load_file(folder / "model.safetensors")
    layers = sorted(n for n in weights if ".layers." in n)
    first, last = ["model.embed_tokens.weight"], ["model.norm.weight"]
    return {n: weights[n] for n in [*first, *layers, *last, "lm_head.weight"] if n in weights}


def reference(folder: Path) -> Answer:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        rows = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    scores = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return ids[len(PROMPT) :], scores[len(PROMPT) - 1 :], scores[: len(PROMPT) - 1]


def assert_same(found: Answer, wanted: Answer) -> None:
    assert found[0] == wanted[0]
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-3)
    np.testing.assert_allclose(found[2], wanted[2], atol=1e-3)


def _answers_after_syncs(
    old: Path, new: Sequence[tuple[Path, int, TransportKind]], tensor_parallel: int = 1
) -> list[Answer]:
    """Load `old`, then sync each folder with buckets of so many bytes."""
    engine = Engine(old, tensor_parallel=tensor_parallel)
    try:
        answers = [engine.answer()]
        for folder, bucket_bytes, kind in new:
            weights = weights_of(folder)
            publisher = engine.open(make_plan(specs(weights), bucket_bytes), kind)
            engine.receive(publisher, weights)
            answers.append(engine.answer())
            publisher.close()
        return answers
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "tied", "vocab"),
    [
        pytest.param("llama", True, 512, id="llama-tied"),
        pytest.param("llama", False, 500, id="llama-untied-padded"),
        pytest.param("qwen2", False, 512, id="qwen2-untied"),
        pytest.param("qwen2", True, 500, id="qwen2-tied-padded"),
        pytest.param("qwen3", True, 500, id="qwen3-tied-padded"),
        pytest.param("qwen3", False, 512, id="qwen3-untied"),
    ],
)
def test_after_a_sync_an_engine_is_the_new_model(
    child: ProcessPoolExecutor, tmp_path: Path, family: Family, tied: bool, vocab: int
) -> None:
    """Whole, in buckets smaller than most tensors, and over TCP."""
    folders = [make_tiny(tmp_path / str(i), family, tied=tied, vocab=vocab, seed=i) for i in range(4)]
    syncs: list[tuple[Path, int, TransportKind]] = [
        (folders[1], 2**26, "shared_memory"),
        (folders[2], 20_000, "shared_memory"),
        (folders[3], 100_000, "gloo"),
    ]
    answers = child.submit(_answers_after_syncs, folders[0], syncs).result(120)
    for folder, answer in zip(folders, answers, strict=True):
        assert_same(answer, reference(folder))


def _tensor_parallel(old: Path, new: Sequence[tuple[Path, int, TransportKind]]) -> list[Answer]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    try:
        return _answers_after_syncs(old, new, tensor_parallel=2)
    finally:
        os.environ.update(CPU.engine_env)


def test_tensor_parallel_workers_receive_their_share(child: ProcessPoolExecutor, tmp_path: Path) -> None:
    folders = [make_tiny(tmp_path / str(i), "qwen3", tied=i < 0, vocab=500, seed=i) for i in range(2)]
    answers = child.submit(_tensor_parallel, folders[0], [(folders[1], 50_000, "shared_memory")]).result(120)
    for folder, answer in zip(folders, answers, strict=True):
        assert_same(answer, reference(folder))


Changes = Mapping[str, tuple[str, Callable[[Weights], Weights]]]
NORM = "model.layers.1.input_layernorm.weight"
CHANGES: Changes = {
    "missing": (f"1 of 20 tensors would not be sent: {NORM}", lambda w: {n: t for n, t in w.items() if n != NORM}),
    "head": ("ties its head", lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"].clone()}),
    "unknown": ("unknown to the engine: model.extra.weight", lambda w: {**w, "model.extra.weight": torch.ones(3)}),
    "shape": ("(191,) for (192,)", lambda w: {**w, NORM: w[NORM][1:]}),
    "dtype": ("bfloat16 for float32", lambda w: {**w, NORM: w[NORM].bfloat16()}),
}


def _refusals(folder: Path) -> tuple[list[str], Answer, Answer]:
    engine = Engine(folder)
    try:
        before = engine.answer()
        messages = []
        for _, change in CHANGES.values():
            plan = make_plan(specs(change(weights_of(folder))), 2**20)
            channel = ChannelInfo(
                kind="shared_memory",
                name=uuid.uuid4().hex,
                host="127.0.0.1",
                port=engine.store.port,
                receivers=("engine 0 worker 0",),
                bucket_bytes=plan.bucket_bytes,
                timeout_s=1.0,
            )
            try:
                sent = init_info(channel, plan, first_receiver=0)
                engine.llm.collective_rpc("init_weight_transfer_engine", args=(sent,))
            except ValueError as error:
                messages.append(str(error))
        return messages, before, engine.answer()
    finally:
        engine.close()


def test_weights_that_do_not_fit_are_refused_and_the_engine_is_as_it_was(
    child: ProcessPoolExecutor, tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path / "model", "llama", tied=True)
    messages, before, after = child.submit(_refusals, folder).result(120)
    assert len(messages) == len(CHANGES)
    for (expected, _), message in zip(CHANGES.values(), messages, strict=True):
        assert message.startswith(f"{REFUSAL} engine 0 worker 0; nothing was sent")
        assert expected in message
    assert after == before
    assert_same(after, reference(folder))


def _broken_off(old: Path, new: Path) -> str:
    engine = Engine(old)
    try:
        weights = weights_of(new)
        publisher = engine.open(make_plan(specs(weights), 300_000))
        short = dict(list(weights.items())[:12])
        try:
            engine.receive(publisher, short)
        except ConnectionError as error:
            return str(error)
        return "nothing happened"
    finally:
        engine.close()


def test_a_sender_that_gives_up_is_named_with_the_tensors_it_owed(child: ProcessPoolExecutor, tmp_path: Path) -> None:
    folders = [make_tiny(tmp_path / str(i), "llama", tied=True, seed=i) for i in range(2)]
    message = child.submit(_broken_off, *folders).result(120)
    assert "learner rank 0 has closed the channel" in message
    assert "bucket" in message
    assert "model.layers.1." in message


def test_vllm_finds_the_plugin() -> None:
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="opd")
    assert point.value == "opd.weight_sync.vllm_plugin:register"
