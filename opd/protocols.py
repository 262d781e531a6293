"""The seams between the parts. `loop.py` knows these and nothing behind them; tests put fakes there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from opd.types import LossStats, OptimStats, Sample, TrainBatch


class SampleSource(Protocol):
    """Gives the samples to learn from, in a seeded order that can be taken up again."""

    async def next_samples(self, count: int) -> list[Sample]:
        """Give the next `count` samples, fewer only at the end of the last epoch; unscored."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Give what is needed to go on from here (JSON types)."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`."""
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
