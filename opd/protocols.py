"""The seams between the parts. `loop.py` knows these and nothing behind them; tests put fakes there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from opd.types import LossStats, OptimStats, Prompt, Sample, SyncStats, TrainBatch


class SampleSource(Protocol):
    """Gives the samples to learn from, in a seeded order that can be taken up again."""

    async def next_samples(self, count: int) -> Sequence[Prompt | Sample]:
        """Give the next `count`, fewer only at the end of the last epoch: unscored, or prompts to be answered first."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Give what is needed to go on from here (JSON types)."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`."""
        ...


class Rollout(Protocol):
    """The student's engines behind one call."""

    async def answer(self, prompt: Prompt, *, seed: int, temperature: float | None = None) -> Sample:
        """Give the prompt's sample with the student's answer; many calls are awaited at the same time.

        Args:
            prompt: what to answer.
            seed: of the sampling; the same weights, prompt and seed give the same answer.
            temperature: instead of the configured one; 0 takes the likeliest id.

        Raises:
            RolloutError: engines were lost more often than they may be restarted.
        """
        ...

    async def close(self) -> None:
        """End the engines."""
        ...


class WeightSync(Protocol):
    """Brings the learner's weights to the rollout engines."""

    async def sync(self, *, probe: bool) -> SyncStats:
        """Publish the learner's weights; when it returns every engine that answers has them.

        Args:
            probe: also compare the engines' log-probabilities with the learner's.

        Raises:
            ParityError: they differ by more than `weight_sync.parity_tolerance`.
            LearnerLost: the learner could not send.
        """
        ...


class WeightPublisher(Protocol):
    """Sends weights from within a learner rank; pickled to it, and opened there."""

    def open(self, info: Any, plan: Any) -> None:
        """Get ready to send as a plan says."""
        ...

    def send(self, named_tensors: Iterable[tuple[str, Any]]) -> None:
        """Send all tensors, in the plan's order; returns when every receiver has let go of what it got."""
        ...

    def close(self) -> None:
        """Let go of the channel."""
        ...


class Scorer(Protocol):
    """Teachers behind one call."""

    async def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Give copies of `samples`, same order, each with its `score`.

        Raises:
            ScoringError: a teacher engine stayed unusable after its restarts, or scored other ids.
        """
        ...

    async def close(self) -> None:
        """End the engines."""
        ...


class Learner(Protocol):
    """The Megatron process group."""

    async def forward_backward(self, batch: TrainBatch) -> LossStats:
        """Add the gradient of the batch's mean loss per trained token to the gradient buffers."""
        ...

    async def optim_step(self) -> OptimStats:
        """Apply and clear the gradients."""
        ...

    async def evaluate(self, batch: TrainBatch) -> LossStats:
        """Compute the loss without a gradient."""
        ...

    async def abort(self) -> None:
        """Make the `forward_backward` or `evaluate` under way raise `StepAborted` soon; weights stay as they are."""
        ...

    async def export_hf(self, folder: Path) -> None:
        """Write config and safetensors (not the tokenizer) into an existing folder."""
        ...

    async def close(self) -> None:
        """End the ranks."""
        ...
