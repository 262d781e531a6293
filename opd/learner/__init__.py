"""The Megatron-core learner."""
