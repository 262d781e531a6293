"""Teacher engines as Ray actors: the thin part between `ScorerPool` and `TeacherEngine`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray.actor import ActorHandle

from opd.config import TeacherConfig
from opd.device import HostProfile
from opd.engine_actor import EngineActor, start_actor
from opd.engine_pool import EngineInfo
from opd.score.engine import TeacherEngine
from opd.score.pool import ScorerPool
from opd.score.requests import EngineReply, ScoreRequest
from opd.turns import NO_TURNS, Turns


class RayEngine(EngineActor):
    """A `TeacherEngine` in a Ray actor; an `Engine`."""

    def __init__(self, name: str, actor: ActorHandle, info: EngineInfo, score_timeout_s: float) -> None:
        super().__init__(name, actor, info)
        self._score_timeout_s = score_timeout_s

    async def score(self, requests: Sequence[ScoreRequest]) -> EngineReply:
        """Score sequences; `WorkerLost` when it dies or takes too long."""
        scoring = self._actor.score.remote(requests)
        return await self._call(scoring, f"scoring {len(requests)} samples", self._score_timeout_s)


def teacher_pool(
    config: TeacherConfig,
    *,
    folder: Path,
    top_k: int,
    vocab_size: int,
    longest: int,
    profile: HostProfile,
    turns: Turns = NO_TURNS,
) -> ScorerPool:
    """Give the pool of one teacher's engines; call its `start()` within a Ray session.

    Args:
        config: Of the teacher.
        folder: HF folder of its weights, readable on every node.
        top_k: Ids kept per position.
        vocab_size: Ids that count: the tokenizer's size, never more than the teacher's embedding rows.
        longest: Tokens of the longest sequence to score.
        profile: Of the hosts with engines.
        turns: Of those that compute on the same cores.

    Raises:
        ValueError: More ids are to be kept than there are.
    """
    if top_k > vocab_size:
        raise ValueError(f"objective.top_k is {top_k} but teacher {config.name} has {vocab_size} ids; lower it")
    # Engines and learner take turns, so an engine may use every core.
    threads = max(1, profile.num_cpus // config.tensor_parallel)
    env = {**profile.engine_env, "HF_HUB_OFFLINE": "1"}  # the folder has all that is needed

    async def start_engine(index: int) -> RayEngine:
        name = f"scorer engine {config.name}/{index}"
        actor, info = await start_actor(
            TeacherEngine,
            (config, str(folder), top_k, vocab_size, longest, profile),
            name=name,
            loads="the teacher",
            env=env,
            threads=threads,
            num_gpus=config.tensor_parallel if profile.has_gpus else 0,
            start_timeout_s=config.start_timeout_s,
        )
        return RayEngine(name, actor, info, config.score_timeout_s)

    return ScorerPool(config, top_k=top_k, start_engine=start_engine, turns=turns)
