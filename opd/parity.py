"""The probe: do rollout engines and learner give the same tokens the same log-probabilities?

Every engine answers the same few prompts greedily, the way it answers all prompts, prefix cache included; the learner
reads these answers. A weight that was lost, a layout that was mixed up or a cache that was kept shows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from opd.config import Dtype
from opd.data.dataset import PreparedData
from opd.data.packing import lay_out
from opd.types import Microbatch, Prompt, Sample, TeacherScore

PARITY_TOLERANCE: dict[Dtype, float] = {"fp32": 1e-3, "bf16": 0.15}
"""Nats, mean over the probe's tokens. In bf16 two right implementations differ by 0.02 to 0.05 on SmolLM2; weights that
are lost or mixed up make whole nats."""

PROBE_PROMPTS = 4
PROBE_TOKENS = 16


class ProbedLearner(Protocol):
    """Reads a microbatch."""

    async def logprobs(self, batch: Microbatch) -> np.ndarray:
        """Give the student's log-probabilities [N] of its trained tokens."""
        ...


class ProbedPool(Protocol):
    """Lets every engine answer."""

    async def answer_on_each(self, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[Sample]:
        """Give the greedy answers of every engine to every prompt."""
        ...


def probe_prompts(data: PreparedData) -> list[Prompt]:
    """Give the prompts of the probe: held-out ones where there are any, the same in the whole run."""
    return [row.prompt for row in (data.heldout or data.train)[:PROBE_PROMPTS]]


async def parity_gaps(learner: ProbedLearner, pool: ProbedPool, prompts: Sequence[Prompt]) -> tuple[float, float]:
    """Give mean and largest gap in nats between the engines' and the learner's log-probabilities."""
    answers = await pool.answer_on_each(prompts, max_new_tokens=PROBE_TOKENS)
    if not answers:
        raise RuntimeError("no rollout engine answered the probe")
    batch = lay_out([answer.with_score(_no_teacher(len(answer.response_ids))) for answer in answers])
    gaps = np.abs(await learner.logprobs(batch) - batch.sampling_logprobs)
    return float(gaps.mean()), float(gaps.max())


def _no_teacher(length: int) -> TeacherScore:
    """Give a score with K = 0: the probe asks no teacher."""
    return TeacherScore(
        token_logprobs=np.full(length, np.nan, np.float32),
        topk_ids=np.zeros((length, 0), np.int32),
        topk_logprobs=np.zeros((length, 0), np.float32),
        covered=np.zeros(length, np.bool_),
    )
