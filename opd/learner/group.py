"""The learner as the loop sees it: all ranks behind one object, each rank a Ray actor."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from safetensors import SafetensorError
from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__

from opd import cluster
from opd.config import GkdObjective, LearnerConfig
from opd.device import HostProfile
from opd.errors import LearnerLost, WorkerLost
from opd.protocols import WeightPublisher
from opd.turns import Turns
from opd.types import NO_LOSS, LossStats, Microbatch, OptimStats, TrainBatch

FIRST_CAUSE_S = 10.0
"""Longest wait for news of a lost rank, after another has failed."""


ABORTS = "opd/aborts"
"""Counter in the rendezvous store: one more makes every rank raise `StepAborted` at its next microbatch.

Not a method, which would need a second thread in the actor: torch computes half as fast outside the main thread, whose
memory allocator keeps freed pages.
"""


class RankActor:
    """A `LearnerRank` in an actor; the driver imports this class, and so needs no megatron."""

    def __init__(self, *args: Any) -> None:
        from opd.learner.megatron import LearnerRank  # here: seconds, and hundreds of MiB, in the actor only

        self._rank = LearnerRank(*args)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank."""
        return getattr(self._rank, method)(*args)


class MegatronLearner:
    """Implements `protocols.Learner`; a call goes to every rank, and the first failure ends them all."""

    def __init__(self, ranks: Sequence[ActorHandle], config: LearnerConfig, turns: Turns) -> None:
        self._ranks = list(ranks)
        self._config = config
        self._turns = turns
        self._store: TCPStore | None = None
        self._store_address = ("", 0)
        self._weight_version = 0

    @classmethod
    async def start(
        cls,
        *,
        model_folder: Path,
        config: LearnerConfig,
        objective: GkdObjective,
        total_steps: int,
        vocab_size: int,
        profile: HostProfile,
        turns: Turns,
    ) -> MegatronLearner:
        """Give a learner whose ranks have loaded the student.

        Raises:
            WorkerLost: a rank died or was not ready within `learner.start_timeout_s`.
            ValueError: the student cannot be trained, see `model.check_supported`, or the cluster is too small.
        """
        size = config.data_parallel
        threads = config.threads or max(1, profile.num_cpus // size)
        made = [
            cluster.spawn(
                RankActor,
                (model_folder, config, objective, total_steps, vocab_size, rank, profile, threads),
                whom=f"learner rank {rank}",
                env={**profile.learner_env},
                threads=threads,
                num_gpus=1 if profile.has_gpus else 0,
            )
            for rank in range(size)
        ]
        learner = cls(await asyncio.gather(*made), config, turns)
        try:
            await learner._join()
        except BaseException:
            await learner.close()
            raise
        return learner

    async def _join(self) -> None:
        what, limit = "joining the process group and loading the student", self._config.start_timeout_s
        host, port = (await self._call("open_store", [()], what=what, timeout_s=limit))[0]  # rank 0 only
        self._store_address = host, port
        self._store = await asyncio.to_thread(TCPStore, host, port, is_master=False)
        await self._call("start", [(host, port)] * len(self._ranks), what=what, timeout_s=limit)

    async def forward_backward(self, batch: TrainBatch) -> LossStats:
        """Add the gradient of the batch's mean loss per trained token to the gradient buffers."""
        what = f"learning from {batch.num_samples} samples"
        async with self._turns("learner"):
            parts = await self._call("forward_backward", [(m, batch.trained_tokens) for m in batch.ranks], what=what)
        return sum(parts, NO_LOSS)

    async def evaluate(self, batch: TrainBatch) -> LossStats:
        """Compute the loss without a gradient."""
        what = f"evaluating {batch.num_samples} samples"
        async with self._turns("learner"):
            parts = await self._call("evaluate", [(m,) for m in batch.ranks], what=what)
        return sum(parts, NO_LOSS)

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of the `TCPStore` that rank 0 serves."""
        return self._store_address

    @property
    def weight_version(self) -> int:
        """Optimiser steps behind the weights that a `publish` called now would send: calls are carried out in order."""
        return self._weight_version

    async def weight_shapes(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Give Hugging Face name, dtype and shape of every tensor, in the order in which they are published."""
        return (await self._call("weight_shapes", [()] * len(self._ranks), what="listing its weights"))[0]

    async def open_publisher(self, publisher: WeightPublisher, info: Any, plan: Any, *, timeout_s: float) -> None:
        """Let rank 0 get ready to send weights."""
        arguments = [(publisher, info, plan)] * len(self._ranks)
        await self._call("open_publisher", arguments, what="opening the weight channel", timeout_s=timeout_s)

    async def publish(self, *, timeout_s: float) -> None:
        """Send the weights."""
        await self._call("publish", [()] * len(self._ranks), what="sending its weights", timeout_s=timeout_s)

    async def logprobs(self, batch: Microbatch) -> np.ndarray:
        """Give the student's log-probabilities [N] of a microbatch's tokens."""
        answers = await self._call("topk_logprobs", [(batch, 1)] * len(self._ranks), what="reading the probe")
        return answers[0][0]

    async def optim_step(self) -> OptimStats:
        """Apply and clear the gradients."""
        async with self._turns("learner"):
            self._weight_version += 1
            calls = [()] * len(self._ranks)
            parts: list[OptimStats] = await self._call("optim_step", calls, what="in the optimizer step")
        return dataclasses.replace(parts[0], memory_gib=max(p.memory_gib for p in parts))

    async def abort(self) -> None:
        """Make the running `forward_backward` or `evaluate` raise `StepAborted` at its next microbatch."""
        assert self._store is not None, "the ranks have not joined"
        with suppress(DistError):  # rank 0, which keeps the store, is lost: the call under way will say so
            await asyncio.to_thread(self._store.add, ABORTS, 1)

    async def export_hf(self, folder: Path) -> None:
        """Write config and safetensors (not the tokenizer) into an existing folder."""
        try:
            await self._call("export", [(folder.resolve(),)] * len(self._ranks), what="writing a checkpoint")
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(str(error)) from None

    async def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            cluster.kill(rank)

    async def _call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, what: str, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `method` on rank i with `arguments[i]`; ranks without arguments are left out."""
        calls = [rank.call.remote(method, *args) for rank, args in zip(self._ranks, arguments, strict=False)]
        return await self._await(calls, what=what, timeout_s=timeout_s or self._config.step_timeout_s)

    async def _await(self, calls: Sequence[ray.ObjectRef], *, what: str, timeout_s: float) -> list[Any]:
        waits = [
            asyncio.ensure_future(cluster.await_call(call, whom=f"learner rank {i}", what=what, timeout_s=timeout_s))
            for i, call in enumerate(calls)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            errors = _errors(waits)
            if errors and not any(isinstance(error, WorkerLost) for error in errors):
                # A rank that waits for a dead one in a collective may fail before the death is known.
                await asyncio.wait(waits, timeout=FIRST_CAUSE_S)
                errors = _errors(waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for error in errors:
            if isinstance(error, WorkerLost):
                raise LearnerLost(error.whom, error.what, error.reason) from None
        if errors:
            raise errors[0]
        return [wait.result() for wait in waits]


def _errors(waits: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Give what those that are done have raised."""
    return [error for wait in waits if wait.done() and (error := wait.exception())]
