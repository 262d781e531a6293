"""What ends a run besides a wrong setting: a process that was lost, and scores that cannot be had."""

from __future__ import annotations


class WorkerLost(RuntimeError):
    """A process of the run died or gave no answer in time; names it, the phase, and the reason."""

    def __init__(self, whom: str, what: str, reason: str) -> None:
        super().__init__(whom, what, reason)  # as positional arguments, so that it can be pickled
        self.whom = whom
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.whom} was lost while {self.what}: {self.reason}"


class LearnerLost(WorkerLost):
    """A rank of the learner was lost, and with it the weights since the last checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says why, and older checkpoints are as they were."""


class ScoringError(ValueError):
    """Scoring cannot go on; the message names the teacher, and the sample or the lost engine."""


class StepAborted(RuntimeError):
    """A learner rank stopped between two microbatches because it was told to; the weights are unchanged."""


class ParityError(RuntimeError):
    """Rollout engine and learner give the same tokens different log-probabilities; names the engine and the gap."""


class RolloutError(ValueError):
    """Answering cannot go on; the message names the lost engine, or the sample and the position."""
