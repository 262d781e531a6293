"""On-policy GKD: the student answers, the teacher scores its answers, the engines get the new weights every step."""

from __future__ import annotations

from opd import presets
from opd.config import GkdObjective, RunConfig, WeightSyncConfig
from opd.device import HostProfile


def recipe(host: HostProfile) -> RunConfig:
    """Give the run for this host: Qwen3 on GSM8K with GPUs, the embedded example without."""
    preset = presets.qwen3_gsm8k() if host.has_gpus else presets.embedded()
    return RunConfig(
        name="gkd-onpolicy",
        student=preset.student,
        teachers=[preset.teacher],
        data=preset.data,  # prompts; their reference answers only serve to measure
        rollout=preset.rollout,  # the student answers ...
        weight_sync=WeightSyncConfig(every_steps=1),  # ... with the weights of the step before
        objective=GkdObjective(beta=0.0, temperature=1.0, top_k=64, tail="bucket"),  # forward KL
        learner=preset.learner,
        run=preset.run,
    )
