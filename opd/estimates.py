"""What a run will ask of memory and disk, from the sizes in the models' own files; no weight is loaded.

The weights, gradients and optimizer state are exact; activations and libraries are rough, and marked so.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from safetensors import SafetensorError, safe_open

from opd.config import Dtype, LearnerConfig, RunConfig, TeacherConfig
from opd.device import GIB, HostProfile
from opd.model_support import head_dim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

    from opd.model_facts import ModelFacts

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}
PROCESS_BYTES = int(0.6 * GIB)
"""Of a process that has loaded torch with vLLM or Megatron; 0.4 to 0.5 GiB were seen."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes of one learner rank."""

    weights: int
    gradients: int
    """fp32, whatever the weights are."""
    optimizer: int
    """Adam's two moments and, for bf16 weights, the fp32 master copy."""
    activations: int
    """Rough: what one full microbatch keeps for its backward pass, and the logits of one chunk."""

    @property
    def state(self) -> int:
        """What the rank holds at all times."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """At the worst moment."""
        return self.state + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of one vLLM engine."""

    weights: int
    kv_cache: int
    """0 where vLLM takes the share of the GPU that it is given."""
    head: int
    """A copy of the lm_head, which scores the response rows apart from vLLM."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Bytes that the run will ask for."""

    learner: LearnerMemory
    """Of one rank."""
    engines: tuple[EngineMemory, ...]
    """Of one engine of each teacher."""
    rollout: EngineMemory | None
    """Of one rollout engine; None off-policy."""
    total_memory: int
    """All processes of a run on this machine's CPUs, libraries included."""
    machine_memory: int
    free_memory: int
    checkpoint: int
    checkpoints_kept: int
    """At the same time, at most."""
    free_disk: int


def count_parameters(folder: Path) -> int:
    """Give the number of parameters of an HF folder, from the headers of its safetensors files.

    Raises:
        ValueError: there are none, or one is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    total = 0
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; the model's weights must be there as safetensors")
        try:
            with safe_open(folder / name, framework="numpy") as stored:
                total += sum(math.prod(stored.get_slice(key).get_shape()) for key in stored.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged or cut short ({error}); fetch or write it again") from error
    return total


def learner_memory(parameters: int, config: PretrainedConfig, learner: LearnerConfig) -> LearnerMemory:
    """Give what one rank needs for a student of a supported family."""
    size = BYTES[learner.dtype]
    optimizer = parameters * (8 if learner.dtype == "fp32" else 12)
    tokens = learner.max_tokens_per_microbatch
    query, key = (heads * head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    # Norms and residuals; queries and keys before and after the rotation, attention's output; gate, up, their product.
    layer = 6 * config.hidden_size + 3 * query + 4 * key
    layer += 4 * config.intermediate_size
    if learner.recompute:
        kept = config.num_hidden_layers * config.hidden_size + layer
    else:
        kept = config.num_hidden_layers * layer
    logits = 3 * 4 * learner.loss_chunk_tokens * config.vocab_size
    return LearnerMemory(
        weights=parameters * size,
        gradients=parameters * 4,
        optimizer=optimizer // learner.data_parallel if learner.distributed_optimizer else optimizer,
        activations=tokens * kept * size + logits,
    )


def engine_memory(parameters: int, config: PretrainedConfig, teacher: TeacherConfig, *, on_gpu: bool) -> EngineMemory:
    """Give what one engine needs, over all its GPUs."""
    text = config.get_text_config()
    head = text.vocab_size * text.hidden_size * (BYTES[teacher.dtype] if on_gpu else 4)
    return EngineMemory(
        weights=parameters * BYTES[teacher.dtype],
        kv_cache=0 if on_gpu else int(teacher.kv_cache_gib * GIB),
        head=head if teacher.scoring == "hidden_states" else 0,
    )


def rollout_memory(parameters: int, config: RunConfig, *, on_gpu: bool) -> EngineMemory | None:
    """Give what one rollout engine needs, over all its GPUs; None where there is none."""
    if config.rollout is None:
        return None
    return EngineMemory(
        weights=parameters * BYTES[config.learner.dtype],
        kv_cache=0 if on_gpu else int(config.rollout.kv_cache_gib * GIB),
        head=0,
    )


def kv_cache_bytes(tokens: int, config: PretrainedConfig, dtype: Dtype) -> int:
    """Give the KV cache that a sequence needs where all layers attend to all tokens."""
    text = config.get_text_config()
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    return tokens * 2 * text.num_hidden_layers * heads * head_dim(text) * BYTES[dtype]


def checkpoint_bytes(parameters: int, learner: LearnerConfig) -> int:
    """Give the size of one checkpoint: the student as HF files, and fp32 weights with Adam's moments to resume."""
    return parameters * (BYTES[learner.dtype] + 12)


def machine_memory() -> tuple[int, int]:
    """Give this machine's memory and how much of it is free, in bytes; a container's limit counts as the machine's."""
    memory = psutil.virtual_memory()
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    total = memory.total if limit == "max" else min(memory.total, int(limit))
    return total, min(memory.available, total)


def free_disk(folder: Path) -> int:
    """Give the free bytes where `folder` is, or will be made."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    return shutil.disk_usage(existing).free


def size_text(size: int) -> str:
    """Give bytes as a person reads them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 2**20:.0f} MiB"


def estimate(
    config: RunConfig, host: HostProfile, student: ModelFacts, teachers: Sequence[ModelFacts], num_steps: int
) -> Estimates:
    """Give what the run will ask of this machine; read from headers and settings."""
    run = config.run
    learner = learner_memory(student.parameters, student.config, config.learner)
    engines = tuple(
        engine_memory(model.parameters, model.config, teacher, on_gpu=host.has_gpus)
        for model, teacher in zip(teachers, config.teachers, strict=True)
    )
    rollout = rollout_memory(student.parameters, config, on_gpu=host.has_gpus)
    ranks = config.learner.data_parallel
    counted = _counted_engines(config, engines, rollout)
    total = PROCESS_BYTES * (1 + ranks + sum(count for count, _ in counted))
    if not host.has_gpus:
        total += ranks * learner.total + sum(count * engine.total for count, engine in counted)
    whole, free = machine_memory()
    saves = 1 if not run.save_every else -(-num_steps // run.save_every)
    return Estimates(
        learner=learner,
        engines=engines,
        rollout=rollout,
        total_memory=total,
        machine_memory=whole,
        free_memory=free,
        checkpoint=checkpoint_bytes(student.parameters, config.learner),
        checkpoints_kept=min(saves, run.keep_last + 2),  # the best one, and the one that is being written
        free_disk=free_disk(config.output_dir),
    )


def _counted_engines(
    config: RunConfig, engines: Sequence[EngineMemory], rollout: EngineMemory | None
) -> list[tuple[int, EngineMemory]]:
    """Give number and memory of each kind of engine."""
    counted = [(t.num_engines, e) for t, e in zip(config.teachers, engines, strict=True)]
    if config.rollout is not None and rollout is not None:
        counted.append((config.rollout.num_engines, rollout))
    return counted


def check_disk(config: RunConfig, estimates: Estimates) -> None:
    """Stop when the checkpoints do not fit.

    Raises:
        ValueError: says what they need, and what to change.
    """
    needed = estimates.checkpoint * estimates.checkpoints_kept
    if needed > estimates.free_disk:
        raise ValueError(
            f"output_dir {str(config.output_dir)!r} has {size_text(estimates.free_disk)} free, but "
            f"{estimates.checkpoints_kept} checkpoints of {size_text(estimates.checkpoint)} need "
            f"{size_text(needed)}; free space, name another output_dir, lower run.keep_last or raise run.save_every"
        )


def check_memory(config: RunConfig, host: HostProfile, estimates: Estimates) -> list[str]:
    """Warn when the whole estimate exceeds what is free.

    Raises:
        ValueError: what is surely needed exceeds the machine.
    """
    if host.has_gpus:
        return []
    learner, ranks = estimates.learner, config.learner.data_parallel
    engines = _counted_engines(config, estimates.engines, estimates.rollout)
    state = ranks * learner.state + sum(count * e.total for count, e in engines)
    remedy = _memory_remedy(config.learner, engines, learner)
    if state > estimates.machine_memory:
        raise ValueError(
            f"the run needs {size_text(state)} for weights, gradients, optimizer and KV cache, but this machine has "
            f"{size_text(estimates.machine_memory)}; {remedy}"
        )
    if estimates.total_memory > estimates.free_memory:
        return [
            f"the run may need {size_text(estimates.total_memory)} and {size_text(estimates.free_memory)} are "
            f"free: it may be killed for memory; end other programs, or {remedy}"
        ]
    return []


def _memory_remedy(learner: LearnerConfig, engines: Sequence[tuple[int, EngineMemory]], memory: LearnerMemory) -> str:
    """Name what would help most."""
    teachers = sum(count * engine.total for count, engine in engines)
    if teachers > learner.data_parallel * memory.total:
        return "choose a smaller teacher, teacher.dtype=bf16, fewer teacher.num_engines or less teacher.kv_cache_gib"
    if memory.activations > memory.state:
        return "lower learner.max_tokens_per_microbatch or set learner.recompute=true"
    return "choose a smaller student, or lower learner.data_parallel"


def kv_warnings(
    config: RunConfig, host: HostProfile, student: ModelFacts, teachers: Sequence[ModelFacts], longest: int
) -> list[str]:
    """Warn of a KV cache that may not hold the longest sequence: vLLM would refuse to start."""
    if host.has_gpus:
        return []
    caches: list[tuple[str, float, PretrainedConfig, Dtype]] = [
        (f"teachers.{i}.kv_cache_gib", teacher.kv_cache_gib, model.config, teacher.dtype)
        for i, (model, teacher) in enumerate(zip(teachers, config.teachers, strict=True))
    ]
    if config.rollout is not None:
        caches.append(("rollout.kv_cache_gib", config.rollout.kv_cache_gib, student.config, config.learner.dtype))
    return [
        f"{field} is {gib:g}, but the longest sequence ({longest} tokens) may need {size_text(needed)}; raise it"
        for field, gib, model_config, dtype in caches
        if (needed := kv_cache_bytes(longest + 1, model_config, dtype)) > gib * GIB
    ]
