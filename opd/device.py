"""Everything that differs between a host with GPUs and one without, as data. The only place that asks.

`HostProfile.detect()` is called once, in `run.py`; a recipe gets it to choose its defaults.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """What this host computes on."""

    kind: Literal["cpu", "cuda"]
    num_cpus: int
    num_gpus: int
    backend: Literal["gloo", "nccl"]
    """Of torch.distributed, between learner ranks."""
    bf16_products: Literal["upcast", "mixed"]
    """How bf16 matrices give an fp32 product: as fp32 tensors that oneDNN rounds, or by `out_dtype` of CUDA's mm."""
    engine_env: Mapping[str, str] = field(default_factory=dict)
    """Environment of a process with a vLLM engine."""
    learner_env: Mapping[str, str] = field(default_factory=dict)
    """Environment of a learner rank."""

    @property
    def has_gpus(self) -> bool:
        """Whether there is at least one GPU."""
        return self.kind == "cuda"

    @property
    def torch_device(self) -> str:
        """Device of tensors: `cpu` or `cuda` (Ray shows each actor its own GPUs only)."""
        return self.kind

    def engine_kwargs(self, *, kv_cache_gib: float, gpu_memory_utilization: float) -> dict[str, Any]:
        """Give the arguments of vLLM that depend on the host."""
        if self.has_gpus:
            return {"gpu_memory_utilization": gpu_memory_utilization}
        # Compiling pays only after minutes here, and an explicit cache size skips vLLM's warm-up.
        return {"enforce_eager": True, "kv_cache_memory_bytes": int(kv_cache_gib * GIB)}

    def peak_memory_gib(self) -> float:
        """Give this process's peak resident set, or what is in use on its GPU."""
        if not self.has_gpus:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        import torch  # here, since everything imports this module and the driver needs no torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB

    @classmethod
    def detect(cls) -> Self:
        """Look at this host, without importing torch: CUDA's devices are files."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        present = len(list(Path("/dev").glob("nvidia[0-9]*")))
        gpus = present if visible is None else min(present, len([v for v in visible.split(",") if v.strip()]))
        cpus = len(os.sched_getaffinity(0))
        return cls.cuda(num_cpus=cpus, num_gpus=gpus) if gpus else cls.cpu(num_cpus=cpus)

    @classmethod
    def cpu(cls, *, num_cpus: int) -> Self:
        """Give the profile of a host without GPUs."""
        # Freed memory stays with the process, in large pages: torch allocates and frees tens of MiB in every operation.
        keeps_pages = {
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824"
            ":glibc.malloc.trim_threshold=1073741824"
        }
        return cls(
            kind="cpu",
            num_cpus=num_cpus,
            num_gpus=0,
            backend="gloo",
            bf16_products="upcast",
            engine_env={
                **keeps_pages,
                "KMP_BLOCKTIME": "1",  # ms: the learner takes the cores when an engine is done
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in-process: starts in 3 s instead of 17 and runs faster
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
            },
            learner_env=keeps_pages,
        )

    @classmethod
    def cuda(cls, *, num_cpus: int, num_gpus: int) -> Self:
        """Give the profile of a host with NVIDIA GPUs."""
        return cls(
            kind="cuda",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            backend="nccl",
            bf16_products="mixed",
            engine_env={"VLLM_NO_USAGE_STATS": "1"},
            learner_env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )
