"""The end of a weight sync in a vLLM worker process; vLLM calls it, see `vllm_plugin.py`.

    init_transfer_engine   plan against model, then open the channel
    start_weight_update    every layer forgets its weights (vLLM's layerwise reload)
    receive_weights        buckets ──► load_weights: a layer that is complete is packed and copied to its old place
    finish_weight_update   the rest; is every parameter new?

From start to finish the engine must not compute, and one in which the update failed must not be used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from opd.weight_sync.channel import BucketReceiver, open_receiver, parse_init_info
from opd.weight_sync.manifest import expected_tensors, tied_heads
from opd.weight_sync.plan import REFUSAL, SyncPlan, check
from opd.weight_sync.receive import unpack


@dataclass
class OpdInitInfo(WeightTransferInitInfo):
    """See `channel.init_info`."""

    channel: dict[str, Any]
    tensors: list[Any]
    bucket_bytes: int
    first_receiver: int


@dataclass
class OpdUpdateInfo(WeightTransferUpdateInfo):
    """Says which weights come."""

    version: int


class OpdTransferEngine(WeightTransferEngine[OpdInitInfo, OpdUpdateInfo]):
    """Takes weights in from a channel of the learner."""

    init_info_cls = OpdInitInfo
    update_info_cls = OpdUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._plan: SyncPlan | None = None
        self._receiver: BucketReceiver | None = None
        self._name = "this engine"
        self._expected: set[str] = set()
        self._loaded: set[str] = set()

    def init_transfer_engine(self, init_info: OpdInitInfo) -> None:
        """Compare the plan with the model, and open the channel instead of what there was before.

        Raises:
            ValueError: They differ; nothing was opened, and the engine is as it was.
            TimeoutError, ConnectionError: The learner's rank 0 was not there.
        """
        channel, plan, first_receiver = parse_init_info(vars(init_info))
        index = first_receiver + get_tensor_model_parallel_rank()
        name = channel.receivers[index]
        if self.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(f"{REFUSAL} {name}: it is pipeline-parallel, and a worker must hold all layers")
        check(plan, expected_tensors(self.model), name)
        self.shutdown()
        self._plan, self._name = plan, name
        self._receiver = open_receiver(channel, index)

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded anew."""
        self._expected = {name for name, _ in self.model.named_parameters()}  # now: without a tied head
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: OpdUpdateInfo) -> None:
        """Take in one version of the weights.

        Raises:
            TimeoutError, ConnectionError: They did not come; the message says which tensors.
            RuntimeError: vLLM could not load a tensor, which the message names.
        """
        assert self._receiver is not None, "init_transfer_engine() comes first"
        assert self._plan is not None
        last = "nothing"

        def noted(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal last
            for name, tensor in tensors:
                last = name
                yield name, tensor

        load_weights: Any = self.model.load_weights
        try:
            self._loaded |= load_weights(noted(unpack(self._receiver, self._plan, self._own_what_is_pending)))
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:
            what = f"{self._name} could not load version {update_info.version} at {last}"
            raise RuntimeError(f"{what}: {error!r}") from error

    def finish_weight_update(self) -> None:
        """Complete the update.

        Raises:
            RuntimeError: A parameter was not loaded.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for head in tied_heads(self.model):
            # Loaded with the embeddings, so the reload passes it over; but a CPU computes with a packed copy of it.
            head.quant_method.process_weights_after_loading(head)
        if missing := sorted(self._expected - self._loaded):
            raise RuntimeError(f"{self._name} got no weights for {len(missing)} parameters, such as {missing[0]}")

    def shutdown(self) -> None:
        """Leave the channel."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _own_what_is_pending(self, bucket: Tensor) -> None:
        """Copy what vLLM still holds of a bucket.

        It keeps the tensors that it was given until their layer is complete: q and k until v is there, an embedding
        whose rows are padded until the end. Looking there is exact, and costs no copy of what is loaded already.
        """
        memory = bucket.untyped_storage().data_ptr()
        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for key, value in call.arguments.items():
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                        call.arguments[key] = _clone(value)


def _clone(tensor: Tensor) -> Tensor:
    clone = tensor.clone()
    for name, value in vars(tensor).items():
        setattr(clone, name, value)  # vLLM notes there which part of a fused layer it is
    return clone
