"""Real Ray and vLLM: a killed and a stopped teacher engine cost time, never scores."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from opd.cluster import ray_session
from opd.config import TeacherConfig
from opd.device import HostProfile
from opd.score.pool import ScoreCounters
from opd.score.ray_engine import teacher_pool
from opd.types import Sample
from tests.tiny_models import make_tiny

CPU = HostProfile.cpu(num_cpus=2)
VOCAB, LONGEST, K = 512, 120, 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A teacher's folder, within a Ray session that leaves nothing behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with ray_session(CPU):
        yield make_tiny(tmp_path_factory.mktemp("teacher"), "llama", tied=True, vocab=VOCAB)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(40):
        prompt, response = int(rng.integers(5, 60)), int(rng.integers(5, 60))
        ids = rng.integers(VOCAB, size=prompt + response, dtype=np.int32)
        made.append(
            Sample(
                sample_id=f"s{i}",
                prompt_ids=ids[:prompt],
                response_ids=ids[prompt:],
                loss_mask=np.ones(response, np.bool_),
                finish_reason="stop",
                source="dataset",
                teacher="teacher",
            )
        )
    return made


def score_with_fault(folder: Path, kill_too: bool) -> tuple[list[Sample], list[Sample], ScoreCounters, int]:
    """Score, then again with engine 0 stopped (so that it surely has work) and perhaps killed."""

    async def main() -> tuple[list[Sample], list[Sample], ScoreCounters, int]:
        # Generous, so that on a busy machine a healthy engine is not taken for a stopped one.
        limit_s = 60.0 if kill_too else 15.0
        config = TeacherConfig.model_validate(
            {"model": str(folder), "dtype": "fp32", "num_engines": 2, "kv_cache_gib": 0.1, "score_timeout_s": limit_s}
        )
        pool = teacher_pool(config, folder=folder, top_k=K, vocab_size=VOCAB, longest=LONGEST, profile=CPU)
        await pool.start()
        try:
            expected = await pool.score(samples())
            victim = pool.engine_infos()[0].pid
            os.kill(victim, signal.SIGSTOP)
            scoring = asyncio.create_task(pool.score(samples()))
            await asyncio.sleep(0.5)
            if kill_too:
                os.kill(victim, signal.SIGKILL)
            given = await scoring
            counters = pool.counters()
        finally:
            await pool.close()
        for _ in range(80):  # Ray kills a process that does not obey after five seconds
            if not psutil.pid_exists(victim) or psutil.Process(victim).status() == psutil.STATUS_ZOMBIE:
                return expected, given, counters, victim
            await asyncio.sleep(0.1)
        raise AssertionError("the stopped engine is still there")

    return asyncio.run(main())


@pytest.mark.parametrize("kill_too", [True, False], ids=["killed", "stopped"])
def test_a_lost_engine_costs_no_scores(teacher: Path, kill_too: bool, caplog: pytest.LogCaptureFixture) -> None:
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="opd.score.pool"):
        expected, given, counters, victim = score_with_fault(teacher, kill_too)
    assert counters.restarts == 1, caplog.text
    assert f"scorer engine teacher/0 (pid {victim}) was lost while scoring" in caplog.text
    assert ("worker process has died" if kill_too else "no answer after 15 s") in caplog.text
    for a, b in zip(expected, given, strict=True):
        assert a.sample_id == b.sample_id
        assert a.score is not None
        assert b.score is not None
        np.testing.assert_allclose(a.score.token_logprobs, b.score.token_logprobs, atol=1e-5, rtol=0)
        np.testing.assert_allclose(a.score.topk_logprobs, b.score.topk_logprobs, atol=1e-5, rtol=0)
    assert time.monotonic() - started < 200
