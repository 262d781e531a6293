"""The probe's arithmetic: which log-probabilities are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from opd.parity import PROBE_TOKENS, parity_gaps
from opd.types import Microbatch, Prompt, RolloutTrace, Sample
from tests.fakes import numbered_prompt

PROMPTS = [numbered_prompt(i, length=3 + i) for i in range(4)]


class Pool:
    """Two engines that answer with as many tokens as they may, at log-probabilities that tell them apart."""

    def __init__(self, engines: int = 2) -> None:
        self._engines = engines

    async def answer_on_each(self, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[Sample]:
        assert max_new_tokens == PROBE_TOKENS
        return [self._answer(prompt, engine) for engine in range(self._engines) for prompt in prompts]

    @staticmethod
    def _answer(prompt: Prompt, engine: int) -> Sample:
        length = 2 + len(prompt.prompt_ids)
        logprobs = np.linspace(-engine, -engine - 1, length, dtype=np.float32)
        versions = np.zeros(length, np.int32)
        return prompt.answered(
            np.arange(length, dtype=np.int32),
            "length",
            RolloutTrace(sampling_logprobs=logprobs, weight_versions=versions),
        )


class Learner:
    """Gives the engines' log-probabilities, changed."""

    def __init__(self, change: np.ndarray | float) -> None:
        self._change = change

    async def logprobs(self, batch: Microbatch) -> np.ndarray:
        self.tokens = batch.num_trained_tokens
        return batch.sampling_logprobs + self._change


def test_engines_that_agree_have_no_gap() -> None:
    learner = Learner(0.0)
    assert asyncio.run(parity_gaps(learner, Pool(), PROMPTS)) == (0.0, 0.0)
    assert learner.tokens == 2 * sum(2 + len(p.prompt_ids) for p in PROMPTS), "every token of every engine"


def test_gaps_do_not_cancel() -> None:
    change = np.zeros(2 * sum(2 + len(p.prompt_ids) for p in PROMPTS))
    change[3], change[-1] = 0.5, -0.5
    mean, largest = asyncio.run(parity_gaps(Learner(change), Pool(), PROMPTS))
    assert mean == pytest.approx(1.0 / len(change))
    assert largest == pytest.approx(0.5)


def test_not_a_number_is_not_hidden() -> None:
    mean, _ = asyncio.run(parity_gaps(Learner(np.nan), Pool(), PROMPTS))
    assert np.isnan(mean)


def test_a_probe_that_nobody_answers_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no rollout engine answered the probe"):
        asyncio.run(parity_gaps(Learner(0.0), Pool(engines=0), PROMPTS))
