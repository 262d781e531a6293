"""Teacher engines behind one call: routing, checks, and what happens when an engine is lost.

    score(samples) ──► jobs of bounded tokens ──► one queue ──► one coroutine per engine ──► answers, checked, in order

Every engine has one job at a time and takes the next when it is done, so the least loaded gets the most. A job whose
engine is lost goes back to the front of the queue, where any live engine takes it, while the lost engine is replaced.
Knows neither Ray nor vLLM: see `ray_engine.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from opd.config import TeacherConfig
from opd.errors import ScoringError, WorkerLost
from opd.score.requests import Engine, EngineInfo, EngineReply, ScoredTokens, ScoreRequest, StartEngine
from opd.types import Sample

logger = logging.getLogger(__name__)

JOB_TOKENS = 4096
"""Tokens of one job: enough for an engine to be busy, little enough to do again."""
JOB_BYTES = 2**28
"""Size of one job's answer; decides when K is large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCounters:
    """What a pool has done so far; differences of two make rates."""

    tokens: int
    """Prompt and response tokens that the engines read, of answered jobs."""
    engine_s: float
    """Seconds that engines spent on answered jobs, added up over engines."""
    restarts: int
    """Engines replaced."""
    memory_gib: float
    """Peak memory of the engines, added up."""


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """Samples that go to an engine together; ordered by age."""

    number: int
    samples: Sequence[Sample] = field(compare=False)
    reply: asyncio.Future[EngineReply] = field(compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(map(_num_scored, self.samples))


class ScorerPool:
    """The engines of one teacher; a `Scorer`.

    Args:
        config: Of the teacher.
        top_k: Ids kept per position.
        start_engine: Starts engine number `index`, or starts it again.
        pause_s: Wait after a start that failed, before the next.
    """

    def __init__(self, config: TeacherConfig, *, top_k: int, start_engine: StartEngine, pause_s: float = 5.0) -> None:
        self._config = config
        self._pause_s = pause_s
        self._start_engine = start_engine
        self._job_tokens = min(JOB_TOKENS, max(1, JOB_BYTES // (8 * top_k)))
        self._engines: dict[int, Engine] = {}
        self._servers: set[asyncio.Task[None]] = set()
        self._queue: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._job_numbers = itertools.count()
        self._memory_gib: dict[int, float] = {}
        self._tokens, self._engine_s, self._restarts = 0, 0.0, 0
        self._window, self._vocab_size = 0, 0

    async def start(self) -> None:
        """Start the engines, all at once.

        Raises:
            ScoringError: One was lost while it loaded.
        """
        starting = [asyncio.create_task(self._start(index)) for index in range(self._config.num_engines)]
        try:
            await asyncio.gather(*starting)
        except BaseException as error:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)  # the first error is the one to tell
            await self.close()
            if isinstance(error, WorkerLost):
                raise ScoringError(f"teacher {self._config.name}: {error}") from None
            raise
        first = self.engine_infos()[0]
        self._window, self._vocab_size = first.window, first.vocab_size
        for index in self._engines:
            self._servers.add(asyncio.create_task(self._serve(index)))

    async def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Give copies of `samples`, same order, each with its score.

        Raises:
            ValueError: A sample does not fit the teacher; nothing was sent.
            ScoringError: Engines were lost too often, or one scored other ids.
        """
        for sample in samples:
            self._check_fits(sample)
        loop = asyncio.get_running_loop()
        jobs = [_Job(next(self._job_numbers), part, loop.create_future()) for part in self._split(samples)]
        for job in jobs:
            self._queue.put_nowait(job)
        try:
            await self._all_answered({job.reply for job in jobs})
        finally:
            for job in jobs:
                job.reply.cancel()  # for an engine that has not begun with it; no effect on an answered one
        return [scored for job in jobs for scored in _paired(job.samples, job.reply.result().answers)]

    def counters(self) -> ScoreCounters:
        """Give what was done so far."""
        return ScoreCounters(
            tokens=self._tokens,
            engine_s=self._engine_s,
            restarts=self._restarts,
            memory_gib=sum(self._memory_gib.values()),
        )

    def engine_infos(self) -> list[EngineInfo]:
        """Give what the engines said when they had loaded, by number."""
        return [self._engines[index].info for index in sorted(self._engines)]

    async def close(self) -> None:
        """End the engines."""
        servers, self._servers = self._servers, set()
        for server in servers:
            server.cancel()
        await asyncio.gather(*servers, return_exceptions=True)  # what they raised, score() has raised
        engines, self._engines = self._engines, {}
        await asyncio.gather(*(engine.close() for engine in engines.values()))

    async def _start(self, index: int) -> None:
        engine = self._engines[index] = await self._start_engine(index)
        logger.info("%s is ready: pid %d, loaded in %.1f s", engine.name, engine.info.pid, engine.info.load_s)

    async def _serve(self, index: int) -> None:
        """Answer jobs with engine `index`, for ever; ends only by an error, which `score` raises."""
        while True:
            job = await self._queue.get()
            if job.reply.done():  # nobody waits for it any more
                continue
            requests = [
                ScoreRequest(
                    ids=np.concatenate([sample.scored_prompt_ids, sample.response_ids]),
                    first_response=len(sample.scored_prompt_ids),
                )
                for sample in job.samples
            ]
            started = time.monotonic()
            try:
                reply = await self._engines[index].score(requests)
            except WorkerLost as lost:
                self._queue.put_nowait(job)
                await self._replace(index, lost)
                continue
            self._engine_s += time.monotonic() - started
            self._tokens += job.num_tokens
            self._memory_gib[index] = reply.memory_gib
            if not job.reply.done():
                job.reply.set_result(reply)

    async def _replace(self, index: int, lost: WorkerLost) -> None:
        """Put a new engine in the place of a lost one."""
        await self._engines[index].kill()
        while True:
            if self._restarts >= self._config.max_restarts:
                raise ScoringError(
                    f"teacher {self._config.name}: an engine was lost after {self._restarts} restarts, as many as "
                    f"max_restarts allows: {lost}"
                )
            self._restarts += 1
            logger.warning("%s\nstarting it again, restart %d of %d", lost, self._restarts, self._config.max_restarts)
            try:
                return await self._start(index)
            except WorkerLost as again:
                lost = again
            except (ValueError, RuntimeError) as error:
                # The same start went well before. What differs now is what the lost engine left: its memory is freed
                # only when the last of its processes has gone.
                lost = WorkerLost(lost.whom, "starting again", repr(error))
                await asyncio.sleep(self._pause_s)

    async def _all_answered(self, waiting: set[asyncio.Future[EngineReply]]) -> None:
        """Wait for replies; raise what ended a server."""
        if not self._servers:
            raise RuntimeError(f"the pool of teacher {self._config.name} is not running")
        while waiting:
            done, _ = await asyncio.wait({*waiting, *self._servers}, return_when=asyncio.FIRST_COMPLETED)
            for server in self._servers & done:
                server.result()
            waiting -= done

    def _check_fits(self, sample: Sample) -> None:
        num_tokens = _num_scored(sample)
        if num_tokens > self._window:
            raise ValueError(
                f"{sample.sample_id}: {num_tokens} tokens (prompt as the teacher sees it, and response) where teacher "
                f"{self._config.name} was started for at most {self._window}; lower data.max_prompt_tokens or "
                "data.max_response_tokens"
            )
        largest = int(max(sample.scored_prompt_ids.max(), sample.response_ids.max()))
        if largest >= self._vocab_size:
            raise ValueError(
                f"{sample.sample_id}: token id {largest} is outside the {self._vocab_size} ids of teacher "
                f"{self._config.name}; student and teacher need one tokenizer"
            )

    def _split(self, samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
        """Cut into parts of at most so many tokens, and into enough of them to busy every engine."""
        share = sum(map(_num_scored, samples)) / self._config.num_engines
        most = min(self._job_tokens, share)
        part: list[Sample] = []
        size = 0
        for sample in samples:
            if part and size + _num_scored(sample) > most:
                yield part
                part, size = [], 0
            part.append(sample)
            size += _num_scored(sample)
        if part:
            yield part


def _num_scored(sample: Sample) -> int:
    return len(sample.scored_prompt_ids) + len(sample.response_ids)


def _paired(samples: Sequence[Sample], answers: Sequence[ScoredTokens]) -> Iterator[Sample]:
    """Give each sample its score, once the ids that were scored are seen to be its own."""
    if len(answers) != len(samples):
        missing = samples[min(len(answers), len(samples) - 1)].sample_id
        raise ScoringError(
            f"{missing}: the teacher engine gave {len(answers)} answers for {len(samples)} samples; this is a bug"
        )
    for sample, answer in zip(samples, answers, strict=True):
        sent, scored = sample.response_ids, answer.scored_ids
        if len(scored) != len(sent):
            raise ScoringError(
                f"{sample.sample_id}: the teacher engine scored {len(scored)} response tokens, the sample has "
                f"{len(sent)}; this is a bug"
            )
        if len(wrong := np.flatnonzero(scored != sent)):
            at = int(wrong[0])
            raise ScoringError(
                f"{sample.sample_id}: at response position {at} the teacher engine scored id {scored[at]} where the "
                f"sample has {sent[at]}; ids must reach the teacher unchanged"
            )
        yield sample.with_score(answer.score)
