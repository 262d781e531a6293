"""Mixed GKD: each sample's answer comes from the student with probability one half, else from the data set."""

from __future__ import annotations

from opd import presets
from opd.config import GkdObjective, RunConfig, WeightSyncConfig
from opd.device import HostProfile


def recipe(host: HostProfile) -> RunConfig:
    """Give the run for this host: Qwen3 on GSM8K with GPUs, the embedded example without."""
    preset = presets.qwen3_gsm8k() if host.has_gpus else presets.embedded()
    return RunConfig(
        name="gkd-mixed",
        student=preset.student,
        teachers=[preset.teacher],
        data=preset.data,  # prompts with reference answers
        rollout=preset.rollout.model_copy(update={"on_policy_fraction": 0.5}),
        weight_sync=WeightSyncConfig(every_steps=1),
        objective=GkdObjective(beta=0.0, temperature=1.0, top_k=64, tail="bucket"),  # forward KL
        learner=preset.learner,
        run=preset.run,
    )
