"""The scorer pool with scripted engines: routing, order, checks, and what happens when engines are lost."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from opd.config import TeacherConfig
from opd.engine_pool import EngineInfo
from opd.errors import ScoringError, WorkerLost
from opd.score.pool import ScorerPool
from opd.score.requests import EngineReply, ScoredTokens, ScoreRequest
from opd.types import Sample, TeacherScore

VOCAB, WINDOW, K = 100, 400, 4

Answer = Callable[[Sequence[ScoreRequest]], list[ScoredTokens]]


def scored(request: ScoreRequest) -> ScoredTokens:
    """What every healthy fake answers: log-probabilities that tell which token of which sequence they belong to."""
    ids = request.ids[request.first_response :]
    own = -(ids + 1000.0 * request.ids[0] + np.arange(len(ids)) / 100).astype(np.float32)
    return ScoredTokens(
        scored_ids=ids.copy(),
        score=TeacherScore(
            token_logprobs=own,
            topk_ids=np.tile(np.arange(K, dtype=np.int32), (len(ids), 1)),
            topk_logprobs=np.full((len(ids), K), -2.0, np.float32),
            covered=ids < K,
        ),
    )


def answers(requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
    return [scored(request) for request in requests]


def dies(requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
    raise WorkerLost("engine t/0 (pid 7)", "scoring", "its worker process has died\n    | Segmentation fault")


def hangs(requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
    raise WorkerLost("engine t/0 (pid 7)", "scoring", "no answer after 0.1 s")


@dataclass
class FakeEngine:
    """Answers by the script's calls in turn, then healthily."""

    index: int
    script: list[Answer]
    delay_s: float = 0.0
    calls: list[Sequence[ScoreRequest]] = field(default_factory=list)
    killed: bool = False
    closed: bool = False

    @property
    def name(self) -> str:
        return f"engine t/{self.index}"

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(pid=7, window=WINDOW, vocab_size=VOCAB, load_s=0.1)

    async def score(self, requests: Sequence[ScoreRequest]) -> EngineReply:
        assert not self.killed, "a killed engine was asked"
        self.calls.append(requests)
        await asyncio.sleep(self.delay_s)
        act = self.script.pop(0) if self.script else answers
        return EngineReply(answers=act(requests), memory_gib=1.5)

    async def close(self) -> None:
        self.closed = self.killed = True

    async def kill(self) -> None:
        self.killed = True


@dataclass
class FakeStarts:
    """Starts fakes; each start takes the next script of its index, a start whose script is an exception fails."""

    scripts: dict[int, list[list[Answer] | Exception]] = field(default_factory=dict)
    delays_s: dict[int, float] = field(default_factory=dict)
    engines: list[FakeEngine] = field(default_factory=list)

    async def __call__(self, index: int) -> FakeEngine:
        await asyncio.sleep(0)
        pending = self.scripts.get(index, [])
        script = pending.pop(0) if pending else []
        if isinstance(script, Exception):
            raise script
        self.engines.append(FakeEngine(index, script, self.delays_s.get(index, 0.0)))
        return self.engines[-1]

    @property
    def sent(self) -> list[ScoreRequest]:
        return [request for engine in self.engines for call in engine.calls for request in call]


def sample(number: int, prompt: int = 10, response: int = 20, **changes: Any) -> Sample:
    ids = (np.arange(prompt + response, dtype=np.int32) * 7 + number) % VOCAB
    ids[0] = number
    fields: dict[str, Any] = {
        "sample_id": f"rows.jsonl:{number}",
        "prompt_ids": ids[:prompt],
        "response_ids": ids[prompt:],
        "loss_mask": np.ones(response, np.bool_),
        "finish_reason": "stop",
        "source": "dataset",
        "teacher": "t",
    }
    return Sample(**(fields | changes))


def run(
    starts: FakeStarts,
    use: Callable[[ScorerPool], Coroutine[Any, Any, Any]],
    *,
    num_engines: int = 1,
    max_restarts: int = 3,
) -> Any:
    """Run `use` on a started pool and close the pool."""

    async def main() -> Any:
        config = TeacherConfig.model_validate(
            {"name": "t", "model": "unused", "num_engines": num_engines, "max_restarts": max_restarts}
        )
        pool = ScorerPool(config, top_k=K, start_engine=starts, pause_s=0.0)
        await pool.start()
        try:
            return await asyncio.wait_for(use(pool), 10)
        finally:
            await pool.close()
            assert all(engine.killed for engine in starts.engines), "an engine outlived its pool"

    return asyncio.run(main())


def assert_scored(samples: Sequence[Sample], given: Sequence[Sample]) -> None:
    assert [s.sample_id for s in given] == [s.sample_id for s in samples]
    for before, after in zip(samples, given, strict=True):
        request = ScoreRequest(
            ids=np.concatenate([before.scored_prompt_ids, before.response_ids]),
            first_response=len(before.scored_prompt_ids),
        )
        assert before.score is None
        assert after.score is not None
        np.testing.assert_array_equal(after.score.token_logprobs, scored(request).score.token_logprobs)


def test_answers_come_in_order_from_several_engines_and_nothing_is_scored_twice() -> None:
    starts = FakeStarts(delays_s={0: 0.01, 1: 0.0, 2: 0.005})
    samples = [sample(i, prompt=5 + i % 7, response=3 + i % 11) for i in range(50)]
    given = run(starts, lambda pool: pool.score(samples), num_engines=3)
    assert_scored(samples, given)
    assert sorted(int(request.ids[0]) for request in starts.sent) == list(range(50))
    assert all(engine.calls for engine in starts.engines), "an engine had nothing to do"


def test_jobs_are_bounded_in_tokens() -> None:
    starts = FakeStarts()
    samples = [sample(i, prompt=100, response=250) for i in range(40)]
    run(starts, lambda pool: pool.score(samples))
    sizes = [sum(len(request.ids) for request in call) for call in starts.engines[0].calls]
    assert sum(sizes) == 40 * 350
    assert max(sizes) <= 4096


def test_a_slow_engine_gets_less() -> None:
    starts = FakeStarts(delays_s={0: 0.2, 1: 0.001})
    samples = [sample(i % 90, prompt=100, response=250) for i in range(150)]
    run(starts, lambda pool: pool.score(samples), num_engines=2)
    slow, fast = (len(engine.calls) for engine in sorted(starts.engines, key=lambda engine: engine.index))
    assert slow < fast


def test_calls_at_the_same_time_get_their_own_answers() -> None:
    first, second = [sample(i) for i in range(9)], [sample(i + 50) for i in range(4)]

    async def both(pool: ScorerPool) -> tuple[list[Sample], list[Sample]]:
        return await asyncio.gather(pool.score(first), pool.score(second))

    given = run(FakeStarts(delays_s={0: 0.01}), both, num_engines=2)
    assert_scored(first, given[0])
    assert_scored(second, given[1])


def test_the_teacher_is_asked_with_its_own_prompt() -> None:
    private = np.arange(33, dtype=np.int32)
    starts = FakeStarts()
    samples = [sample(3, teacher_prompt_ids=private)]
    assert_scored(samples, run(starts, lambda pool: pool.score(samples)))
    assert starts.sent[0].first_response == 33
    np.testing.assert_array_equal(starts.sent[0].ids[:33], private)


def test_no_samples_no_work() -> None:
    assert run(FakeStarts(), lambda pool: pool.score([])) == []


def test_samples_that_came_one_at_a_time_go_together() -> None:
    starts = FakeStarts(delays_s={0: 0.02})
    samples = [sample(i, prompt=100, response=250) for i in range(40)]

    async def one_by_one(pool: ScorerPool) -> list[Sample]:
        given = await asyncio.gather(*(pool.score([one]) for one in samples))
        return [one for part in given for one in part]

    assert_scored(samples, run(starts, one_by_one))
    assert [len(call) for call in starts.engines[0].calls] == [11, 11, 11, 7], "4096 tokens are the most of one call"


def test_what_waits_is_shared_out() -> None:
    starts = FakeStarts(delays_s={0: 0.02, 1: 0.02})
    samples = [sample(i) for i in range(8)]

    async def one_by_one(pool: ScorerPool) -> None:
        await asyncio.gather(*(pool.score([one]) for one in samples))

    run(starts, one_by_one, num_engines=2)
    assert all(engine.calls for engine in starts.engines), "one engine took all"


@pytest.mark.parametrize("fault", [dies, hangs])
def test_what_was_sent_together_is_scored_again(fault: Answer) -> None:
    starts = FakeStarts(scripts={0: [[fault]]})
    samples = [sample(i) for i in range(9)]

    async def one_by_one(pool: ScorerPool) -> list[Sample]:
        given = await asyncio.gather(*(pool.score([one]) for one in samples))
        return [one for part in given for one in part]

    assert_scored(samples, run(starts, one_by_one))


@pytest.mark.parametrize("fault", [dies, hangs])
def test_what_a_lost_engine_had_is_scored_again(fault: Answer, caplog: pytest.LogCaptureFixture) -> None:
    starts = FakeStarts(scripts={0: [[fault]]})
    samples = [sample(i) for i in range(30)]

    async def use(pool: ScorerPool) -> Any:
        return await pool.score(samples), pool.counters()

    with caplog.at_level(logging.WARNING):
        given, counters = run(starts, use, num_engines=2)
    assert_scored(samples, given)
    assert counters.restarts == 1
    assert "engine t/0 (pid 7) was lost while scoring" in caplog.text
    assert "restart 1 of 3" in caplog.text


def test_the_only_engine_is_replaced_and_the_old_one_killed(caplog: pytest.LogCaptureFixture) -> None:
    starts = FakeStarts(scripts={0: [[dies], [hangs]]})
    samples = [sample(i) for i in range(5)]

    async def use(pool: ScorerPool) -> Any:
        given = await pool.score(samples)
        assert [engine.killed for engine in starts.engines] == [True, True, False]
        return given, pool.counters()

    with caplog.at_level(logging.WARNING):
        given, counters = run(starts, use)
    assert_scored(samples, given)
    assert counters.restarts == 2
    assert counters.tokens == sum(s.num_tokens for s in samples)
    assert counters.memory_gib == 1.5
    assert "Segmentation fault" in caplog.text
    assert "no answer after 0.1 s" in caplog.text


def test_a_restart_that_fails_is_tried_again() -> None:
    out_of_memory = ValueError("free memory is less than desired")
    starts = FakeStarts(scripts={0: [[dies], out_of_memory, WorkerLost("engine t/0", "loading", "died"), []]})
    samples = [sample(1)]
    assert_scored(samples, run(starts, lambda pool: pool.score(samples)))


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_too_many_losses_end_the_run(max_restarts: int) -> None:
    starts = FakeStarts(scripts={0: [[dies] for _ in range(9)]})
    with pytest.raises(ScoringError, match=f"teacher t: .*after {max_restarts} restarts.*") as error:
        run(starts, lambda pool: pool.score([sample(1)]), max_restarts=max_restarts)
    assert "engine t/0 (pid 7) was lost while scoring: its worker process has died" in str(error.value)
    assert "Segmentation fault" in str(error.value)
    assert len(starts.engines) == max_restarts + 1


def test_a_pool_that_gave_up_says_so_again() -> None:
    async def use(pool: ScorerPool) -> None:
        for _ in range(2):
            with pytest.raises(ScoringError, match="was lost"):
                await pool.score([sample(1)])

    run(FakeStarts(scripts={0: [[dies]]}), use, max_restarts=0)


def changed_id(requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
    given = answers(requests)
    given[1].scored_ids[5] = 99
    return given


def test_other_ids_than_sent_stop_the_run() -> None:
    samples = [sample(i) for i in range(3)]
    sent = samples[1].response_ids[5]
    with pytest.raises(ScoringError, match=rf"rows.jsonl:1: at response position 5 .* scored id 99 .* has {sent}"):
        run(FakeStarts(scripts={0: [[changed_id]]}), lambda pool: pool.score(samples))


def test_swapped_answers_stop_the_run() -> None:
    swapped: Answer = lambda requests: answers(requests)[::-1]  # noqa: E731
    with pytest.raises(ScoringError, match=r"rows.jsonl:0: at response position 0"):
        run(FakeStarts(scripts={0: [[swapped]]}), lambda pool: pool.score([sample(0), sample(1)]))


def test_fewer_answers_than_samples_stop_the_run() -> None:
    short: Answer = lambda requests: answers(requests)[:-1]  # noqa: E731
    with pytest.raises(ScoringError, match=r"rows.jsonl:2: .*2 answers for 3 samples"):
        run(FakeStarts(scripts={0: [[short]]}), lambda pool: pool.score([sample(i) for i in range(3)]))


def test_fewer_tokens_than_sent_stop_the_run() -> None:
    def cut(requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        return answers([ScoreRequest(ids=r.ids[:-1], first_response=r.first_response) for r in requests])

    with pytest.raises(ScoringError, match=r"rows.jsonl:4: .*scored 19 response tokens, the sample has 20"):
        run(FakeStarts(scripts={0: [[cut]]}), lambda pool: pool.score([sample(4)]))


def test_a_sample_longer_than_the_window_is_refused_before_anything_is_sent() -> None:
    starts = FakeStarts()
    samples = [sample(1), sample(2, prompt=200, response=201)]
    with pytest.raises(ValueError, match=r"rows.jsonl:2: 401 tokens .* at most 400"):
        run(starts, lambda pool: pool.score(samples))
    assert starts.sent == []


def test_an_id_that_the_teacher_lacks_is_refused_before_anything_is_sent() -> None:
    starts = FakeStarts()
    foreign = sample(1, response_ids=np.full(20, VOCAB, np.int32))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: token id 100 is outside the 100 ids"):
        run(starts, lambda pool: pool.score([foreign]))
    assert starts.sent == []


def test_what_an_engine_itself_raises_reaches_the_caller() -> None:
    def raises(requests: Sequence[ScoreRequest]) -> list[ScoredTokens]:
        raise FloatingPointError("logits are not finite")

    with pytest.raises(FloatingPointError, match="not finite"):
        run(FakeStarts(scripts={0: [[raises]]}), lambda pool: pool.score([sample(1)]))


def test_a_cancelled_call_leaves_the_pool_usable() -> None:
    starts = FakeStarts(delays_s={0: 0.05})

    async def use(pool: ScorerPool) -> list[Sample]:
        many = [sample(i % 90, prompt=100, response=250) for i in range(60)]
        call = asyncio.create_task(pool.score(many))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await pool.score([sample(1)])

    assert_scored([sample(1)], run(starts, use))
    assert len(starts.engines[0].calls) == 2, "jobs that nobody waits for were still sent"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (WorkerLost("engine t/1", "loading the teacher", "no answer after 600 s"), ScoringError),
        (ValueError("max_model_len is too large"), ValueError),
    ],
)
def test_an_engine_that_does_not_start_ends_all(fault: Exception, expected: type[Exception]) -> None:
    starts = FakeStarts(scripts={1: [fault]})
    with pytest.raises(expected, match=str(fault)):
        run(starts, lambda pool: pool.score([]), num_engines=3)
    assert all(engine.killed for engine in starts.engines)


def test_a_closed_pool_refuses() -> None:
    async def use(pool: ScorerPool) -> None:
        await pool.close()
        with pytest.raises(RuntimeError, match="not running"):
            await pool.score([sample(1)])

    run(FakeStarts(), use)


def test_the_pool_imports_nothing_heavy() -> None:
    check = (
        "import sys, opd.score.pool; print([m for m in ('ray', 'vllm', 'torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
