"""Off-policy GKD: the student learns from the data set's own answers. No rollouts, no weight broadcast."""

from __future__ import annotations

from opd import presets
from opd.config import GkdObjective, RunConfig
from opd.device import HostProfile


def recipe(host: HostProfile) -> RunConfig:
    """Give the run for this host: Qwen3 on GSM8K with GPUs, the embedded example without."""
    preset = presets.qwen3_gsm8k() if host.has_gpus else presets.embedded()
    return RunConfig(
        name="gkd-offpolicy",
        student=preset.student,
        teachers=[preset.teacher],
        data=preset.data,  # prompts with reference answers
        rollout=None,  # no student engine ...
        weight_sync=None,  # ... and nothing to broadcast to
        objective=GkdObjective(beta=0.0, temperature=1.0, top_k=64, tail="bucket"),  # forward KL
        learner=preset.learner,
        run=preset.run,
    )
