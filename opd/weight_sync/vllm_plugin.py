"""vLLM's entry point: every process of an engine calls `register` before it builds a model."""

from __future__ import annotations

import functools


@functools.cache  # vLLM refuses a name that is registered twice
def register() -> None:
    """Make `weight_transfer_config={"backend": "opd"}` known; the engine itself is imported when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine("opd", "opd.weight_sync.transfer_engine", "OpdTransferEngine")
