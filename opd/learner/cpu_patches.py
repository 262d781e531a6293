"""What Megatron-core assumes about CUDA, answered for a CPU, one function each with its reason.

`apply()` is called once in a learner process on a host without GPUs, before a model is built; never at import. The
patches are known to be right for the versions in `TESTED` and refuse others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.overrides import TorchFunctionMode

TESTED = ("0.16", "0.19")
"""megatron-core versions whose CUDA assumptions were looked through."""


class _CudaMeansCpu(TorchFunctionMode):
    """Reads `device="cuda"` as the CPU in every torch call, and names CPU tensors as Megatron's optimizer expects."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **kwargs)
        # the optimizers sort parameters by the string "torch.cuda.FloatTensor"
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _NoStream:
    """Stands for a CUDA stream where there is none: everything has already happened."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: object = None) -> object:
        """Give the event back."""
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Read "cuda" as the CPU while Megatron's own code builds, schedules or steps."""
    with _CudaMeansCpu():
        yield


def apply() -> None:
    """Patch this process.

    Raises:
        RuntimeError: the installed megatron-core was not looked through.
    """
    version = megatron.core.__version__
    if not version.startswith(TESTED):
        raise RuntimeError(
            f"megatron-core {version} on a CPU is untested (tested: {', '.join(TESTED)}); install one of those"
        )
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # passed on as `device=` in some 40 places
    cuda.synchronize = lambda *_: None  # timers and buffers wait for the device
    cuda.current_stream = lambda *_: _NoStream()  # 0.19 orders its communication by streams
    cuda.default_stream = lambda *_: _NoStream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    # recomputation saves and restores the device's random state; on a CPU that is the one state there is
    random: Any = megatron_random
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)
