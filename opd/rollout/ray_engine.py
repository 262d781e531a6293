"""Student engines as Ray actors: the thin part between `RolloutPool` and `StudentEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from opd.config import Dtype, RolloutConfig
from opd.device import HostProfile
from opd.engine_actor import EngineActor, start_actor
from opd.engine_pool import EngineInfo
from opd.rollout.engine import StudentEngine
from opd.rollout.pool import RolloutPool
from opd.rollout.requests import PumpReply, RolloutRequest
from opd.turns import NO_TURNS, Turns


class RayEngine(EngineActor):
    """A `StudentEngine` in a Ray actor; an `Engine`."""

    def __init__(self, name: str, actor: ActorHandle, info: EngineInfo, config: RolloutConfig) -> None:
        super().__init__(name, actor, info)
        self._config = config

    async def pump(self, new: Sequence[RolloutRequest], cancel: Sequence[str]) -> PumpReply:
        """Compute for `rollout.poll_s`; `WorkerLost` when it dies or takes longer than `rollout.answer_timeout_s`."""
        pumping = self._actor.pump.remote(new, cancel, self._config.poll_s)
        return await self._call(pumping, "answering prompts", self._config.answer_timeout_s)

    async def open_channel(self, init_info: Mapping[str, Any], *, timeout_s: float) -> None:
        """See `requests.Engine`."""
        await self._call(self._actor.open_channel.remote(init_info), "opening the weight channel", timeout_s)

    async def receive(self, version: int, *, timeout_s: float) -> None:
        """See `requests.Engine`."""
        receiving = self._actor.receive.remote(version, {"version": version})
        await self._call(receiving, f"receiving weights of version {version}", timeout_s)


def student_pool(
    config: RolloutConfig,
    *,
    dtype: Dtype,
    folder: Path,
    vocab_size: int,
    end_token_ids: Sequence[int],
    longest: int,
    profile: HostProfile,
    seed: int,
    turns: Turns = NO_TURNS,
    weight_transfer: bool = True,
    num_token_ids: int | None = None,
) -> RolloutPool:
    """Give the pool of the student's engines; call its `start()` within a Ray session.

    Args:
        config: Of the rollouts.
        dtype: What the student computes in.
        folder: HF folder of its first weights, readable on every node.
        vocab_size: Ids that count, as in the learner.
        end_token_ids: Any of them ends an answer.
        longest: Tokens of the longest prompt and response.
        profile: Of the hosts with engines.
        seed: Of the run; every engine gets another one made from it.
        turns: Of those that compute on the same cores.
        weight_transfer: Whether the weights can be replaced.
        num_token_ids: Ids that may be sampled; unset: all that count.
    """
    # Engines and learner take turns, so an engine may use every core.
    threads = max(1, profile.num_cpus // config.tensor_parallel)
    env = {
        **profile.engine_env,
        "HF_HUB_OFFLINE": "1",  # the folder has all that is needed
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # vLLM computes within a call only: no weights change in a step
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one that `HeadSettings` knows
    }

    async def start_engine(index: int) -> RayEngine:
        name = f"rollout engine {index}"
        args = (
            config, dtype, str(folder), vocab_size, end_token_ids, longest, profile, seed + index, weight_transfer,
            num_token_ids,
        )  # fmt: skip
        actor, info = await start_actor(
            StudentEngine,
            args,
            name=name,
            loads="the student",
            env=env,
            threads=threads,
            num_gpus=config.tensor_parallel if profile.has_gpus else 0,
            start_timeout_s=config.start_timeout_s,
        )
        return RayEngine(name, actor, info, config)

    return RolloutPool(config, start_engine=start_engine, turns=turns)
