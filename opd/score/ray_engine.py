"""Teacher engines as Ray actors: the thin part between `ScorerPool` and `TeacherEngine`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ray.actor import ActorHandle

from opd.cluster import await_call, kill, spawn
from opd.config import TeacherConfig
from opd.device import HostProfile
from opd.errors import WorkerLost
from opd.score.engine import TeacherEngine
from opd.score.pool import ScorerPool
from opd.score.requests import EngineInfo, EngineReply, ScoreRequest

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class RayEngine:
    """A `TeacherEngine` in a Ray actor; an `Engine`."""

    def __init__(self, name: str, actor: ActorHandle, info: EngineInfo, score_timeout_s: float) -> None:
        self._name = name
        self._actor = actor
        self._info = info
        self._score_timeout_s = score_timeout_s

    @property
    def name(self) -> str:
        """As `scorer engine teacher/0`."""
        return self._name

    @property
    def info(self) -> EngineInfo:
        """What it said of itself when it had loaded."""
        return self._info

    async def score(self, requests: Sequence[ScoreRequest]) -> EngineReply:
        """Score sequences; `WorkerLost` when it dies or takes too long."""
        return await await_call(
            self._actor.score.remote(requests),
            whom=f"{self._name} (pid {self._info.pid})",
            what=f"scoring {len(requests)} samples",
            timeout_s=self._score_timeout_s,
        )

    async def close(self) -> None:
        """End it in good order; kill it when it is dead, or busy for too long."""
        closing = self._actor.close.remote()
        try:
            await await_call(closing, whom=self._name, what="ending", timeout_s=CLOSE_TIMEOUT_S)
        except WorkerLost as lost:
            logger.info("%s", lost)
        finally:
            kill(self._actor)

    async def kill(self) -> None:
        """End it at once; fine for one that is dead."""
        kill(self._actor)


def teacher_pool(
    config: TeacherConfig, *, folder: Path, top_k: int, vocab_size: int, longest: int, profile: HostProfile
) -> ScorerPool:
    """Give the pool of one teacher's engines; call its `start()` within a Ray session.

    Args:
        config: Of the teacher.
        folder: HF folder of its weights, readable on every node.
        top_k: Ids kept per position.
        vocab_size: Ids that count: the tokenizer's size, never more than the teacher's embedding rows.
        longest: Tokens of the longest sequence to score.
        profile: Of the hosts with engines.

    Raises:
        ValueError: More ids are to be kept than there are.
    """
    if top_k > vocab_size:
        raise ValueError(f"objective.top_k is {top_k} but teacher {config.name} has {vocab_size} ids; lower it")
    # Engines and learner take turns, so the engines together may use every core.
    threads = max(1, profile.num_cpus // (config.num_engines * config.tensor_parallel))
    env = {**profile.engine_env, "HF_HUB_OFFLINE": "1"}  # the folder has all that is needed

    async def start_engine(index: int) -> RayEngine:
        name = f"scorer engine {config.name}/{index}"
        args = (config, str(folder), top_k, vocab_size, longest, profile)
        num_gpus = config.tensor_parallel if profile.has_gpus else 0
        actor = await spawn(TeacherEngine, args, whom=name, env=env, threads=threads, num_gpus=num_gpus)
        try:
            loading = actor.ready.remote()
            info = await await_call(loading, whom=name, what="loading the teacher", timeout_s=config.start_timeout_s)
        except BaseException:
            kill(actor)
            raise
        return RayEngine(name, actor, info, config.score_timeout_s)

    return ScorerPool(config, top_k=top_k, start_engine=start_engine)
