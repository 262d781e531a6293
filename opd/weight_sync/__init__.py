"""Weights of the learner, into the rollout engines."""
