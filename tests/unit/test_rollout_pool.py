"""The rollout pool with scripted engines: routing, checks, and what happens when engines are lost."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from opd.config import RolloutConfig
from opd.errors import RolloutError, WorkerLost
from opd.rollout.pool import RolloutPool
from opd.rollout.requests import Answer, PumpReply
from opd.turns import NO_TURNS, Turns
from opd.types import Prompt, Sample
from tests.fakes import FakeStudent, FakeStudents, numbered_prompt, written

MAX_NEW = 20


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"max_new_tokens": MAX_NEW, "temperature": 0.7, "top_k": 5} | changes)


def run(
    starts: FakeStudents,
    use: Callable[[RolloutPool], Coroutine[Any, Any, Any]],
    *,
    turns: Turns = NO_TURNS,
    **changes: Any,
) -> Any:
    """Run `use` on a started pool and close the pool."""

    async def main() -> Any:
        pool = RolloutPool(config(**changes), start_engine=starts, pause_s=0.0, turns=turns)
        await pool.start()
        try:
            return await asyncio.wait_for(use(pool), 10)
        finally:
            await pool.close()
            assert all(engine.killed for engine in starts.engines), "an engine outlived its pool"

    return asyncio.run(main())


async def answer_all(pool: RolloutPool, prompts: Sequence[Prompt]) -> list[Sample]:
    return await asyncio.gather(*(pool.answer(prompt, seed=i) for i, prompt in enumerate(prompts)))


def assert_answered(prompts: Sequence[Prompt], samples: Sequence[Sample], starts: FakeStudents) -> None:
    """Every prompt has its own answer, and no engine gave one twice."""
    assert [s.sample_id for s in samples] == [p.sample_id for p in prompts]
    for seed, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        np.testing.assert_array_equal(sample.prompt_ids, prompt.prompt_ids)
        np.testing.assert_array_equal(sample.response_ids, written(prompt.prompt_ids, seed))
    keys = [answer.key for engine in starts.engines for answer in engine.given]
    assert len(keys) == len(set(keys)) == len(prompts)


async def dies() -> PumpReply:
    raise WorkerLost("rollout engine 0 (pid 7)", "answering prompts", "its worker process has died\n    | SIGKILL")


async def freezes() -> PumpReply:
    raise WorkerLost("rollout engine 0 (pid 7)", "answering prompts", "no answer after 120 s")


def test_every_answer_reaches_its_prompt() -> None:
    starts = FakeStudents()
    prompts = [numbered_prompt(i) for i in range(50)]
    samples = run(starts, lambda pool: answer_all(pool, prompts), num_engines=3)
    assert_answered(prompts, samples, starts)
    for sample in samples:
        assert (sample.source, sample.finish_reason, sample.teacher) == ("rollout", "stop", "teacher")
        assert sample.loss_mask.all()
        assert sample.rollout is not None
        assert sample.rollout.sampling_logprobs.tolist() == [-0.5] * len(sample.response_ids)
        assert sample.meta == {"row": sample.sample_id}


def test_requests_carry_every_sampling_value() -> None:
    starts = FakeStudents()

    async def use(pool: RolloutPool) -> None:
        await pool.answer(numbered_prompt(1), seed=11)
        await pool.answer(numbered_prompt(1), seed=12, temperature=0.0, max_new_tokens=3)

    run(starts, use, top_p=0.9, min_p=0.1)
    values = [(r.seed, r.temperature, r.max_new_tokens, r.top_p, r.top_k, r.min_p) for r in starts.engines[0].taken]
    assert values == [(11, 0.7, MAX_NEW, 0.9, 5, 0.1), (12, 0.0, 3, 0.9, 5, 0.1)]


def test_prompts_go_to_the_least_loaded_engine() -> None:
    starts = FakeStudents()
    prompts = [numbered_prompt(0, length=200), *(numbered_prompt(i, length=4) for i in range(1, 10))]
    run(starts, lambda pool: answer_all(pool, prompts), num_engines=2)
    first, second = (engine.taken for engine in starts.engines)
    assert len(first[0].prompt_ids) == 200
    assert len(second) == 9, "all short ones weigh less than the long one"


def test_answers_to_one_prompt_share_an_engine_while_loads_are_about_equal() -> None:
    starts = FakeStudents()
    prompts = [numbered_prompt(i) for i in range(4) for _ in range(4)]
    run(starts, lambda pool: answer_all(pool, prompts), num_engines=2)
    homes = [{int(r.prompt_ids[0]) for r in engine.taken} for engine in starts.engines]
    assert homes == [{0, 2}, {1, 3}]


def test_many_answers_to_one_prompt_use_every_engine() -> None:
    starts = FakeStudents()
    run(starts, lambda pool: answer_all(pool, [numbered_prompt(1)] * 64), num_engines=2)
    sizes = [len(engine.taken) for engine in starts.engines]
    assert sum(sizes) == 64
    assert max(sizes) - min(sizes) <= 8


def test_a_finished_answer_does_not_wait_for_the_others() -> None:
    starts = FakeStudents(pumps_per_answer={2: 50})

    async def use(pool: RolloutPool) -> int:
        slow = asyncio.create_task(pool.answer(numbered_prompt(2), seed=2))
        await pool.answer(numbered_prompt(1), seed=1)
        pumps = starts.engines[0].pumps
        await slow
        return pumps

    assert run(starts, use) < 5


@pytest.mark.parametrize("fault", [dies, freezes])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_what_a_lost_engine_had_is_answered_by_another(
    fault: Callable[[], Any], num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    starts = FakeStudents(scripts={0: [[None, None, fault]]}, pumps_per_answer={i: 1 + i % 4 for i in range(30)})
    prompts = [numbered_prompt(i) for i in range(30)]

    async def use(pool: RolloutPool) -> Any:
        return await answer_all(pool, prompts), pool.counters()

    with caplog.at_level(logging.WARNING):
        samples, counters = run(starts, use, num_engines=num_engines)
    assert_answered(prompts, samples, starts)
    assert counters.restarts == 1
    assert counters.memory_gib == 1.5 * num_engines
    assert starts.engines[0].killed
    assert starts.engines[0].given, "it should have answered something before"
    assert "rollout engine 0 (pid 7) was lost while answering prompts" in caplog.text
    assert "restart 1 of 3" in caplog.text


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_too_many_losses_end_every_call(max_restarts: int) -> None:
    starts = FakeStudents(scripts={0: [[dies] for _ in range(9)]})

    async def use(pool: RolloutPool) -> None:
        calls = [asyncio.create_task(pool.answer(numbered_prompt(i), seed=i)) for i in range(3)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, RolloutError) for error in done)
        await pool.answer(numbered_prompt(5), seed=5)  # it says so again

    with pytest.raises(
        RolloutError, match=rf"the student: .*after {max_restarts} restarts.*rollout engine 0 \(pid 7\)"
    ):
        run(starts, use, max_restarts=max_restarts)
    assert len(starts.engines) == max_restarts + 1


def test_an_engine_that_does_not_start_ends_all() -> None:
    starts = FakeStudents(scripts={1: [WorkerLost("rollout engine 1", "loading the student", "no answer after 600 s")]})
    with pytest.raises(
        RolloutError, match="rollout engine 1 was lost while loading the student: no answer after 600 s"
    ):
        run(starts, lambda pool: answer_all(pool, []), num_engines=3)
    assert all(engine.killed for engine in starts.engines)


def test_a_restart_that_fails_is_tried_again() -> None:
    starts = FakeStudents(
        scripts={0: [[dies], ValueError("free memory"), WorkerLost("rollout engine 0", "x", "y"), []]}
    )
    prompts = [numbered_prompt(1)]
    assert_answered(prompts, run(starts, lambda pool: answer_all(pool, prompts)), starts)


def test_a_new_engine_is_brought_up_before_it_answers() -> None:
    starts = FakeStudents(scripts={0: [[dies]]})

    async def use(pool: RolloutPool) -> None:
        async def bring_up(index: int) -> None:
            engine = pool.engines()[index]
            assert isinstance(engine, FakeStudent)
            assert engine.pumps == 0, "it answered with the weights that it loaded"
            for _ in range(5):
                await asyncio.sleep(0)
            await engine.receive(3, timeout_s=1.0)

        pool.on_started = bring_up
        sample = await pool.answer(numbered_prompt(1), seed=0)
        assert sample.rollout is not None
        assert set(sample.rollout.weight_versions) == {3}

    run(starts, use)
    assert [engine.version for engine in starts.engines] == [0, 3]


def test_an_engine_that_is_lost_while_it_is_brought_up_is_replaced() -> None:
    starts = FakeStudents(scripts={0: [[dies]]})
    brought_up: list[FakeStudent] = []

    async def use(pool: RolloutPool) -> None:
        async def bring_up(index: int) -> None:
            engine = pool.engines()[index]
            assert isinstance(engine, FakeStudent)
            brought_up.append(engine)
            if len(brought_up) < 3:
                pool.lose(index, WorkerLost(engine.name, "receiving weights", "it died"))
                assert index not in pool.engines()

        pool.on_started = bring_up
        await pool.answer(numbered_prompt(1), seed=0)

    run(starts, use)
    assert brought_up == starts.engines[1:]
    assert [bool(engine.pumps) for engine in starts.engines] == [True, False, False, True]


def test_an_error_while_bringing_up_ends_the_run() -> None:
    async def use(pool: RolloutPool) -> None:
        async def bring_up(index: int) -> None:
            raise ValueError("lm_head.weight is unknown to the engine")

        pool.on_started = bring_up
        await pool.answer(numbered_prompt(1), seed=0)

    with pytest.raises(ValueError, match=r"lm_head.weight is unknown"):
        run(FakeStudents(scripts={0: [[dies]]}), use)


def test_who_holds_an_engine_keeps_it_from_answering() -> None:
    starts = FakeStudents()

    async def use(pool: RolloutPool) -> None:
        async with pool.busy(0):
            call = asyncio.create_task(pool.answer(numbered_prompt(1), seed=0))
            await asyncio.sleep(0.02)
            assert starts.engines[0].pumps == 0
        await call

    run(starts, use)


def test_a_sync_in_mid_answer_gets_its_turn_and_shows_in_the_versions() -> None:
    starts = FakeStudents(pumps_per_answer={1: 10})

    async def use(pool: RolloutPool) -> Sample:
        call = asyncio.create_task(pool.answer(numbered_prompt(1), seed=0))
        await asyncio.sleep(0)
        while starts.engines[0].pumps < 3:
            await asyncio.sleep(0)
        async with pool.busy(0):
            assert starts.engines[0].pumps < 9
            await pool.engines()[0].receive(1, timeout_s=1.0)
        return await call

    sample = run(starts, use)
    assert sample.rollout is not None
    assert 0 in sample.rollout.weight_versions
    assert 1 in sample.rollout.weight_versions


def test_an_engine_that_a_sync_gave_up_answers_no_more() -> None:
    starts = FakeStudents(pumps_per_answer=dict.fromkeys(range(4), 20))
    prompts = [numbered_prompt(i) for i in range(4)]

    async def use(pool: RolloutPool) -> list[Sample]:
        call = asyncio.create_task(answer_all(pool, prompts))
        while starts.engines[0].pumps < 3:
            await asyncio.sleep(0)
        async with pool.busy(0):
            pumps = starts.engines[0].pumps
            pool.lose(0, WorkerLost("rollout engine 0", "receiving weights", "no answer after 120 s"))
        samples = await call
        assert starts.engines[0].pumps == pumps
        return samples

    assert_answered(prompts, run(starts, use, num_engines=2), starts)
    assert len(starts.engines) == 3


def test_an_answer_that_nobody_waits_for_is_cancelled() -> None:
    starts = FakeStudents(pumps_per_answer={1: 10**6})

    async def use(pool: RolloutPool) -> Sample:
        call = asyncio.create_task(pool.answer(numbered_prompt(1), seed=1))
        while starts.engines[0].pumps < 3:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while starts.engines[0].held:
            await asyncio.sleep(0)
        pumps = starts.engines[0].pumps
        await asyncio.sleep(0.01)
        assert starts.engines[0].pumps == pumps, "an engine with nothing to do was called"
        return await pool.answer(numbered_prompt(2), seed=2)

    assert run(starts, use).sample_id == "s2"


def test_each_engine_answers_the_probe() -> None:
    starts = FakeStudents(scripts={1: [[dies]]})
    prompts = [numbered_prompt(1), numbered_prompt(2)]
    samples = run(starts, lambda pool: pool.answer_on_each(prompts, max_new_tokens=4), num_engines=2)
    assert [s.sample_id for s in samples] == ["s1", "s2", "s1", "s2"]
    given = {engine.index: len(engine.given) for engine in starts.engines if engine.given}
    assert given == {0: 2, 1: 2}
    assert all(r.temperature == 0.0 and r.max_new_tokens == 4 for engine in starts.engines for r in engine.taken)


@pytest.mark.parametrize(("rule", "trained"), [("train", True), ("mask", False)])
def test_answers_that_were_cut_off(rule: str, trained: bool) -> None:
    starts = FakeStudents(cut_off={2})
    ended, cut = run(
        starts, lambda pool: answer_all(pool, [numbered_prompt(1), numbered_prompt(2)]), truncated_answers=rule
    )
    assert (ended.finish_reason, cut.finish_reason) == ("stop", "length")
    assert ended.loss_mask.all()
    assert cut.loss_mask.tolist() == [trained] * len(cut.response_ids)


def changes_ids(answer: Answer) -> Answer:
    answer.prompt_ids[2] = 99
    return answer


def test_another_prompt_than_sent_stops_the_run() -> None:
    sent = numbered_prompt(4).prompt_ids[2]
    with pytest.raises(
        RolloutError, match=rf"s4: at prompt position 2 the engine answered id 99 where {sent} was sent"
    ):
        run(FakeStudents(tamper=changes_ids), lambda pool: pool.answer(numbered_prompt(4), seed=0))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (numbered_prompt(3, length=381), r"s3: 381 prompt tokens and 20 new ones .* at most 400"),
        (
            Prompt(sample_id="s3", prompt_ids=np.array([1, 100], np.int32), teacher="t"),
            r"s3: token id 100 is outside the student's 100 ids",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(prompt: Prompt, message: str) -> None:
    starts = FakeStudents()
    with pytest.raises(ValueError, match=message):
        run(starts, lambda pool: pool.answer(prompt, seed=0))
    assert starts.engines[0].taken == []


def test_what_an_engine_itself_raises_reaches_the_caller() -> None:
    async def raises() -> PumpReply:
        raise FloatingPointError("logits are not finite")

    starts = FakeStudents(scripts={0: [[raises]]})
    with pytest.raises(FloatingPointError, match="not finite"):
        run(starts, lambda pool: pool.answer(numbered_prompt(1), seed=0))


def test_a_closed_pool_refuses() -> None:
    async def use(pool: RolloutPool) -> None:
        await pool.close()
        with pytest.raises(RuntimeError, match="the student is not running"):
            await pool.answer(numbered_prompt(1), seed=0)

    run(FakeStudents(), use)


def test_on_shared_cores_one_computes_at_a_time_and_all_have_their_turn() -> None:
    turns = Turns(shared_cores=True)
    starts = FakeStudents(pumps_per_answer=dict.fromkeys(range(4), 5))
    computing: list[int] = []
    starts.while_pumping = lambda: computing.append(sum(engine.pumping for engine in starts.engines))

    async def use(pool: RolloutPool) -> int:
        call = asyncio.create_task(answer_all(pool, [numbered_prompt(i) for i in range(4)]))
        learned = 0
        while not call.done():
            async with turns("learner"):
                assert not any(engine.pumping for engine in starts.engines)
                learned += 1
                await asyncio.sleep(0)
        await call
        return learned

    assert run(starts, use, num_engines=2, turns=turns) >= 5
    assert set(computing) == {1}


def test_elsewhere_nobody_waits_for_a_turn() -> None:
    async def main() -> None:
        async with NO_TURNS("learner"), NO_TURNS("rollout engine 0"):
            pass

    asyncio.run(asyncio.wait_for(main(), 1))


def test_counters_add_up() -> None:
    starts = FakeStudents()

    async def use(pool: RolloutPool) -> Any:
        samples = await answer_all(pool, [numbered_prompt(i) for i in range(6)])
        return samples, pool.counters()

    samples, counters = run(starts, use, num_engines=2)
    assert counters.tokens == sum(len(s.response_ids) for s in samples)
    assert counters.engine_s == pytest.approx(0.1 * sum(engine.pumps for engine in starts.engines))
    assert (counters.restarts, counters.memory_gib) == (0, 3.0)


def test_the_pool_imports_nothing_heavy() -> None:
    check = (
        "import sys, opd.rollout.pool; print([m for m in ('ray', 'vllm', 'torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
