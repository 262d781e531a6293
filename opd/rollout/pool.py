"""Student engines behind one call: routing, checks, and what happens when an engine is lost.

    answer(prompt) ──► least loaded engine's list ──► one coroutine per engine pumps: new requests in, answers out
                                                                  │
                        engine lost: its requests go to the others, or wait for the new engine

Every engine answers many prompts at once and tells every `poll_s` which are finished. Between two pumps a weight sync
can hold an engine (`busy`). A new engine has the weights of the student's folder; `on_started` brings it to the current
ones before it is given anything. Knows neither Ray nor vLLM: see `ray_engine.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from opd.config import RolloutConfig
from opd.engine_pool import EnginePool
from opd.errors import RolloutError, WorkerLost
from opd.rollout.requests import Answer, Engine, PumpReply, RolloutRequest, StartEngine
from opd.turns import NO_TURNS, Turns
from opd.types import Prompt, RolloutTrace, Sample

PREFIX_SLACK = 4
"""Answers that an engine may be ahead of the least loaded and still get one more to a prompt that it has cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounters:
    """What a pool has done so far; differences of two make rates."""

    tokens: int
    """Tokens sampled, those of answers that were lost with an engine too."""
    engine_s: float
    """Seconds that engines spent on it, added up over engines."""
    restarts: int
    """Engines replaced."""
    memory_gib: float
    """Peak memory of the engines, added up."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request and whoever waits for its answer."""

    request: RolloutRequest
    answer: asyncio.Future[Answer]
    only: int | None
    """The one engine that may answer it."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_new_tokens


@dataclass(slots=True, eq=False)
class _Slot:
    """One engine's place in the pool."""

    new: list[_Asked] = field(default_factory=list)
    """Routed here, not yet sent."""
    sent: dict[str, _Asked] = field(default_factory=dict)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    up: bool = False
    """Whether the engine runs with the current weights."""
    lost: WorkerLost | None = None

    @property
    def asked(self) -> list[_Asked]:
        """What is not answered yet, oldest first."""
        return [asked for asked in (*self.sent.values(), *self.new) if not asked.answer.done()]


class RolloutPool(EnginePool[Engine]):
    """The student's engines; a `Rollout`.

    Args:
        config: Of the rollouts.
        start_engine: Starts engine number `index`, or starts it again.
        pause_s: Wait after a start that failed, before the next.
        turns: Of those that compute on the same cores.
    """

    def __init__(
        self, config: RolloutConfig, *, start_engine: StartEngine, pause_s: float = 5.0, turns: Turns = NO_TURNS
    ) -> None:
        super().__init__(
            "the student",
            num_engines=config.num_engines,
            max_restarts=config.max_restarts,
            start_engine=start_engine,
            error=RolloutError,
            pause_s=pause_s,
        )
        self._config, self._turns = config, turns
        self._slots = [_Slot() for _ in range(config.num_engines)]
        self._keys = itertools.count()
        self._tokens, self._engine_s = 0, 0.0
        self.on_started: Callable[[int], Awaitable[None]] | None = None
        """Awaited after engine `index` was started (again) and before it is given anything."""

    async def answer(
        self, prompt: Prompt, *, seed: int, temperature: float | None = None, max_new_tokens: int | None = None
    ) -> Sample:
        """Give the prompt's sample with the student's answer; many calls are awaited at the same time.

        Args:
            prompt: What to answer.
            seed: Of the sampling; the same weights, prompt and seed give the same answer.
            temperature: Instead of the configured one; 0 takes the likeliest id.
            max_new_tokens: Instead of the configured one.

        Raises:
            ValueError: The prompt does not fit the engines; nothing was sent.
            RolloutError: Engines were lost too often, or one answered other ids.
        """
        return await self._answer(prompt, seed, temperature, max_new_tokens, only=None)

    async def answer_on_each(self, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[Sample]:
        """Give the greedy answers of every engine to every prompt, engine by engine."""
        calls = [
            asyncio.ensure_future(self._answer(prompt, 0, 0.0, max_new_tokens, only=index))
            for index in range(len(self._slots))
            for prompt in prompts
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    def engines(self) -> Mapping[int, Engine]:
        """Give the engines that run, by number; one that was just started too."""
        return {index: engine for index, engine in self._engines.items() if self._slots[index].lost is None}

    def busy(self, index: int) -> asyncio.Lock:
        """Give the lock that keeps an engine from answering; it is free between two pumps."""
        return self._slots[index].busy

    def lose(self, index: int, lost: WorkerLost) -> None:
        """Give an engine up: it answers no more, is killed and started anew."""
        self._slots[index].lost = lost
        self._slots[index].work.set()

    def counters(self) -> RolloutCounters:
        """Give what was done so far."""
        return RolloutCounters(
            tokens=self._tokens,
            engine_s=self._engine_s,
            restarts=self._restarts,
            memory_gib=sum(self._memory_gib.values()),
        )

    async def _answer(
        self, prompt: Prompt, seed: int, temperature: float | None, max_new_tokens: int | None, *, only: int | None
    ) -> Sample:
        config = self._config
        request = RolloutRequest(
            key=str(next(self._keys)),
            prompt_ids=prompt.prompt_ids,
            seed=seed,
            max_new_tokens=config.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=config.temperature if temperature is None else temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
        )
        waiting = asyncio.get_running_loop().create_future()
        if self._servers:  # else `_all_done` refuses
            self._check_fits(prompt, request)
            self._route(_Asked(request, waiting, only))
        try:
            await self._all_done({waiting})
        finally:
            waiting.cancel()  # for an engine that has not finished it; no effect on an answered one
        return self._sample(prompt, waiting.result())

    async def _serve(self, index: int) -> None:
        """Let engine `index` answer, for ever; ends only by an error, which `answer` raises."""
        slot = self._slots[index]
        await self._bring_up(index)
        while True:
            await slot.work.wait()
            async with slot.busy:
                if slot.lost is None:
                    async with self._turns(f"rollout engine {index}"):
                        await self._pump(index)
            if slot.lost is not None:
                self._give_away(slot)
                await self._replace(index, slot.lost)
                await self._bring_up(index)
            if not slot.asked and not slot.sent and slot.lost is None:
                slot.work.clear()

    async def _bring_up(self, index: int) -> None:
        """Let a started engine get the current weights; while that fails for its own fault, replace it."""
        slot = self._slots[index]
        while True:
            slot.lost = None
            if self.on_started is not None:
                await self.on_started(index)
            if slot.lost is None:
                slot.up = True
                return
            await self._replace(index, slot.lost)

    async def _pump(self, index: int) -> None:
        slot = self._slots[index]
        cancelled = [key for key, asked in slot.sent.items() if asked.answer.done()]
        for key in cancelled:
            del slot.sent[key]
        fresh, slot.new = [asked for asked in slot.new if not asked.answer.done()], []
        if not fresh and not slot.sent and not cancelled:
            return
        slot.sent |= {asked.request.key: asked for asked in fresh}
        try:
            reply = await self._engines[index].pump([asked.request for asked in fresh], cancelled)
        except WorkerLost as lost:
            slot.lost = lost
            return
        self._count(index, reply)
        for answer in reply.answers:
            asked = slot.sent.pop(answer.key, None)
            if asked is None:
                raise RolloutError(f"rollout engine {index} answered request {answer.key}, which it has not got")
            if not asked.answer.done():
                asked.answer.set_result(answer)

    def _count(self, index: int, reply: PumpReply) -> None:
        self._tokens += reply.generated_tokens
        self._engine_s += reply.busy_s
        self._memory_gib[index] = reply.memory_gib

    def _give_away(self, slot: _Slot) -> None:
        """Route what a lost engine had not finished once more."""
        slot.up = False
        left = slot.asked
        slot.new, slot.sent = [], {}
        for asked in left:
            self._route(asked)

    def _route(self, asked: _Asked) -> None:
        """Give a request to the engine with the fewest tokens to come, or to one that knows the prompt already."""
        if asked.only is not None:
            slot = self._slots[asked.only]
        else:
            # With no engine up the request waits for one that is being started.
            slots = [slot for slot in self._slots if slot.up and slot.lost is None] or self._slots
            waiting = [slot.asked for slot in slots]
            loads = [sum(a.num_tokens for a in asks) for asks in waiting]
            prompt, most = asked.request.prompt_ids, min(loads) + PREFIX_SLACK * asked.num_tokens
            knows = [any(np.array_equal(a.request.prompt_ids, prompt) for a in asks) for asks in waiting]
            # Sorted by load; one that knows the prompt and is not far ahead comes first.
            order = sorted(range(len(slots)), key=lambda i: (not (knows[i] and loads[i] <= most), loads[i]))
            slot = slots[order[0]]
        slot.new.append(asked)
        slot.work.set()

    def _check_fits(self, prompt: Prompt, request: RolloutRequest) -> None:
        length = len(prompt.prompt_ids)
        if length + request.max_new_tokens > self._window:
            raise ValueError(
                f"{prompt.sample_id}: {length} prompt tokens and {request.max_new_tokens} new ones where the student's "
                f"engines were started for at most {self._window}; lower data.max_prompt_tokens or "
                "rollout.max_new_tokens"
            )
        if (largest := int(prompt.prompt_ids.max())) >= self._vocab_size:
            raise ValueError(
                f"{prompt.sample_id}: token id {largest} is outside the student's {self._vocab_size} ids; the prompt "
                "was made with another tokenizer"
            )

    def _sample(self, prompt: Prompt, answer: Answer) -> Sample:
        """Make the sample, once the ids that were answered are seen to be the prompt's."""
        sent, seen = prompt.prompt_ids, answer.prompt_ids
        if len(seen) != len(sent):
            raise RolloutError(
                f"{prompt.sample_id}: the engine answered {len(seen)} prompt tokens where {len(sent)} were sent; this "
                "is a bug"
            )
        if len(wrong := np.flatnonzero(seen != sent)):
            at = int(wrong[0])
            raise RolloutError(
                f"{prompt.sample_id}: at prompt position {at} the engine answered id {seen[at]} where {sent[at]} was "
                "sent; ids must reach the student unchanged"
            )
        cut_off = answer.finish_reason == "length"
        return prompt.answered(
            answer.response_ids,
            answer.finish_reason,
            RolloutTrace(sampling_logprobs=answer.sampling_logprobs, weight_versions=answer.weight_versions),
            trained=not (cut_off and self._config.truncated_answers == "mask"),
        )
