"""Which samples the student answers itself: all of them, or each with a seeded probability."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from opd.data.dataset import DatasetSource
from opd.types import Prompt, Sample


class OnPolicySource:
    """A `SampleSource` that turns samples of a data set into prompts for the student.

    Whether sample number `i` of the run is turned depends on (seed, i) only: not on how the run is cut into steps, and
    a resumed run goes on with the same draws.
    """

    def __init__(self, rows: DatasetSource, *, fraction: float, samples_per_prompt: int, seed: int) -> None:
        """Start at the first sample of `rows`.

        Args:
            rows: gives one sample, or prompt without an answer, per prompt.
            fraction: probability that a sample's answer comes from the student.
            samples_per_prompt: answers to each prompt; their ids end in `/1`, `/2` and so on. 1 where fraction is not.
            seed: of the draws.
        """
        self._rows = rows
        self._fraction = fraction
        self._samples_per_prompt = samples_per_prompt
        self._seed = seed
        self._drawn = 0

    async def next_samples(self, count: int) -> list[Prompt | Sample]:
        """Give the next `count`, a multiple of `samples_per_prompt`; fewer only at the end of the last epoch."""
        taken: list[Prompt | Sample] = []
        for row in await self._rows.next_samples(count // self._samples_per_prompt):
            if not self._draw():
                taken.append(row)
                continue
            prompt = row.prompt
            if self._samples_per_prompt == 1:
                taken.append(prompt)
                continue
            names = (f"{prompt.sample_id}/{number + 1}" for number in range(self._samples_per_prompt))
            taken.extend(dataclasses.replace(prompt, sample_id=name) for name in names)
        return taken

    def _draw(self) -> bool:
        draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, self._drawn]))).random()
        self._drawn += 1
        return bool(draw < self._fraction)

    def state(self) -> Mapping[str, Any]:
        """Give what is needed to go on from here (JSON types)."""
        return {**self._rows.state(), "drawn": self._drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`.

        Raises:
            ValueError: the state was made with other data, another seed or another order.
        """
        self._rows.restore(state)
        self._drawn = int(state["drawn"])
