"""The recipes as they come, for a host with GPUs and one without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from opd import presets
from opd.builtin_models import BUILTIN
from opd.device import HostProfile
from opd.recipes import load_recipe

CPU = HostProfile.cpu(num_cpus=2)
CUDA = HostProfile.cuda(num_cpus=16, num_gpus=2)
OFFPOLICY = Path(__file__).parents[2] / "recipes" / "gkd_offpolicy.py"


@pytest.mark.parametrize(("host", "preset"), [(CPU, presets.embedded()), (CUDA, presets.qwen3_gsm8k())])
def test_offpolicy_recipe_starts_no_student_engine(host: HostProfile, preset: presets.Preset) -> None:
    config = load_recipe(OFFPOLICY, host)
    assert config.rollout is None
    assert config.weight_sync is None
    assert config.student == preset.student
    assert config.teachers == [preset.teacher]
    assert config.data == preset.data


def test_embedded_example_needs_no_download() -> None:
    preset = presets.embedded()
    for model in (preset.student.model, preset.teacher.model):
        assert model.removeprefix("builtin:") in BUILTIN
    assert preset.data.source.startswith("reasoning_gym:")


def test_presets_are_frozen() -> None:
    preset = presets.embedded()
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset.student = presets.qwen3_gsm8k().student  # type: ignore[misc]
