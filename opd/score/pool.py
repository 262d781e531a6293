"""Teacher engines behind one call: routing, checks, and what happens when an engine is lost.

    score(samples) ──► jobs of bounded tokens ──► one queue ──► one coroutine per engine ──► answers, checked, in order

Every engine has one call at a time and takes its share of what waits when it is done, so the least loaded gets the
most; small jobs go together, since samples come one at a time where answers do. Jobs whose engine is lost go back to
the front of the queue, where any live engine takes them, while the lost engine is replaced.
Knows neither Ray nor vLLM: see `ray_engine.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from opd.config import TeacherConfig
from opd.engine_pool import EnginePool
from opd.errors import ScoringError, WorkerLost
from opd.score.requests import Engine, ScoredTokens, ScoreRequest, StartEngine
from opd.turns import NO_TURNS, Turns
from opd.types import Sample

JOB_TOKENS = 4096
"""Tokens of one call: enough for an engine to be busy, little enough to do again."""
JOB_BYTES = 2**28
"""Size of one call's answer; decides when K is large."""


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
    reply: asyncio.Future[Sequence[ScoredTokens]] = field(compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(map(_num_scored, self.samples))


class ScorerPool(EnginePool[Engine]):
    """The engines of one teacher; a `Scorer`.

    Args:
        config: Of the teacher.
        top_k: Ids kept per position.
        start_engine: Starts engine number `index`, or starts it again.
        pause_s: Wait after a start that failed, before the next.
        turns: Of those that compute on the same cores.
    """

    def __init__(
        self,
        config: TeacherConfig,
        *,
        top_k: int,
        start_engine: StartEngine,
        pause_s: float = 5.0,
        turns: Turns = NO_TURNS,
    ) -> None:
        super().__init__(
            f"teacher {config.name}",
            num_engines=config.num_engines,
            max_restarts=config.max_restarts,
            start_engine=start_engine,
            error=ScoringError,
            pause_s=pause_s,
        )
        self._config, self._turns = config, turns
        self._job_tokens = min(JOB_TOKENS, max(1, JOB_BYTES // (8 * top_k)))
        self._queue: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._job_numbers = itertools.count()
        self._tokens, self._engine_s = 0, 0.0

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
            await self._all_done({job.reply for job in jobs})
        finally:
            for job in jobs:
                job.reply.cancel()  # for an engine that has not begun with it; no effect on an answered one
        return [scored for job in jobs for scored in _paired(job.samples, job.reply.result())]

    def counters(self) -> ScoreCounters:
        """Give what was done so far."""
        return ScoreCounters(
            tokens=self._tokens,
            engine_s=self._engine_s,
            restarts=self._restarts,
            memory_gib=sum(self._memory_gib.values()),
        )

    async def _serve(self, index: int) -> None:
        """Answer jobs with engine `index`, for ever; ends only by an error, which `score` raises."""
        while True:
            first = await self._queue.get()
            lost: WorkerLost | None = None
            async with self._turns(self._engines[index].name):
                if jobs := self._share(first):  # more may have come meanwhile; nobody may wait for any of them
                    lost = await self._score(index, jobs)
            if lost is not None:
                await self._replace(index, lost)

    async def _score(self, index: int, jobs: Sequence[_Job]) -> WorkerLost | None:
        """Answer jobs in one call; when the engine is lost, put them back and tell of it."""
        requests = [
            ScoreRequest(
                ids=np.concatenate([sample.scored_prompt_ids, sample.response_ids]),
                first_response=len(sample.scored_prompt_ids),
            )
            for job in jobs
            for sample in job.samples
        ]
        started = time.monotonic()
        try:
            reply = await self._engines[index].score(requests)
        except WorkerLost as lost:
            for job in jobs:
                self._queue.put_nowait(job)
            return lost
        self._engine_s += time.monotonic() - started
        self._tokens += sum(job.num_tokens for job in jobs)
        self._memory_gib[index] = reply.memory_gib
        answers = list(reply.answers)
        for job in jobs:
            # The last job gets what is left, so that its caller sees answers that are missing or too many.
            count = len(answers) if job is jobs[-1] else len(job.samples)
            if not job.reply.done():
                job.reply.set_result(answers[:count])
            answers = answers[count:]
        return None

    def _share(self, first: _Job) -> list[_Job]:
        """Give the oldest waiting jobs that make up one engine's share, but no more than one call may have."""
        waiting = [first, *(self._queue.get_nowait() for _ in range(self._queue.qsize()))]
        waiting = sorted(job for job in waiting if not job.reply.done())
        most = min(self._job_tokens, sum(job.num_tokens for job in waiting) / self._config.num_engines)
        sizes = itertools.accumulate(job.num_tokens for job in waiting)
        count = max(1, sum(size <= most for size in sizes))
        for job in waiting[count:]:
            self._queue.put_nowait(job)
        return waiting[:count]

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
