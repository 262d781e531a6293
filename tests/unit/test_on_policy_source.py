"""Which samples the student answers: drawn per sample, seeded, and the same after a resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from opd.data.on_policy import OnPolicySource
from opd.types import Prompt, Sample
from tests.fakes import ListSource, numbered_sample


def source(fraction: float = 0.4, *, samples_per_prompt: int = 1, seed: int = 0, rows: int = 500) -> OnPolicySource:
    given: Any = ListSource([numbered_sample(i) for i in range(rows)])
    return OnPolicySource(given, fraction=fraction, samples_per_prompt=samples_per_prompt, seed=seed)


def take(source: OnPolicySource, *counts: int) -> list[Prompt | Sample]:
    async def main() -> list[Prompt | Sample]:
        return [item for count in counts for item in await source.next_samples(count)]

    return asyncio.run(main())


def kinds(items: list[Prompt | Sample]) -> list[tuple[str, type]]:
    return [(item.sample_id, type(item)) for item in items]


def test_the_draw_is_per_sample_and_does_not_depend_on_the_size_of_a_step() -> None:
    at_once = kinds(take(source(), 480))
    assert at_once == kinds(take(source(), *[16] * 30)) == kinds(take(source(), 1, 7, 472))
    shares = [sum(kind is Prompt for _, kind in at_once[i : i + 16]) for i in range(0, 480, 16)]
    assert len(set(shares)) > 3, "not a fixed share of each batch"
    assert 0.33 < sum(shares) / 480 < 0.47


def test_another_seed_draws_otherwise() -> None:
    assert kinds(take(source(seed=1), 100)) != kinds(take(source(seed=2), 100))


@pytest.mark.parametrize(("fraction", "kind"), [(0.0, Sample), (1.0, Prompt)])
def test_the_ends_leave_nothing_to_chance(fraction: float, kind: type) -> None:
    assert {type(item) for item in take(source(fraction), 400)} == {kind}


def test_a_restored_source_goes_on_with_the_same_draws() -> None:
    whole = kinds(take(source(), 300))
    first, second = source(), source()
    begun = kinds(take(first, 130))
    second.restore(first.state())
    assert begun + kinds(take(second, 170)) == whole
    assert first.state() == {"index": 130, "drawn": 130}


def test_answers_to_one_prompt_have_names_of_their_own() -> None:
    items = take(source(1.0, samples_per_prompt=3), 6, 3)
    assert [item.sample_id for item in items] == [f"s{i}/{k}" for i in range(3) for k in (1, 2, 3)]
    assert all(item.prompt_ids[0] == i // 3 for i, item in enumerate(items))


def test_the_end_of_the_data_gives_fewer() -> None:
    assert len(take(source(1.0, samples_per_prompt=2, rows=3), 4, 4, 4)) == 6
