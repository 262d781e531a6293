"""The learner's side: tensors, one after another as they are exported, into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from opd.weight_sync.channel import SLOTS, BucketSender, ChannelInfo, open_sender
from opd.weight_sync.plan import SyncPlan, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class Publisher:
    """A `protocols.WeightPublisher`. Light and picklable until it is opened."""

    def __init__(self) -> None:
        self._plan: SyncPlan | None = None
        self._sender: BucketSender | None = None
        self._under_way = SLOTS

    def open(self, info: ChannelInfo, plan: SyncPlan) -> None:
        """Open the channel; returns when every receiver has.

        Raises:
            TimeoutError, ConnectionError: A receiver, which the message names, did not.
        """
        self._plan, self._sender = plan, open_sender(info)
        self._under_way = info.buckets_under_way

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send all tensors; returns when every receiver has released all of them. After an error the channel is closed.

        Args:
            named_tensors: In the plan's order, shapes and dtypes. Each is let go before the next is asked for.

        Raises:
            ValueError: They are not what was planned.
            TimeoutError, ConnectionError: A receiver did not take them; the message names it and the tensors.
        """
        assert self._sender is not None, "open() comes first"
        assert self._plan is not None
        try:
            self._send(self._plan, self._sender, iter(named_tensors))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the channel; receivers that still wait get an error."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _send(self, plan: SyncPlan, sender: BucketSender, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        tensor: Tensor | None = None
        for number, bucket in enumerate(plan.buckets):
            with plan.naming(max(number - self._under_way, 0)):  # the one that a receiver must release first
                buffer = sender.buffer()
            for piece in bucket:
                spec = plan.tensors[piece.tensor]
                if not piece.tensor_offset:
                    tensor = _checked(next(named_tensors, None), spec)
                assert tensor is not None
                place = buffer[piece.bucket_offset : piece.bucket_offset + piece.nbytes].view(tensor.dtype)
                if piece.nbytes == spec.nbytes:
                    place.view(spec.shape).copy_(tensor)
                else:
                    tensor = tensor.contiguous()  # once: after that it is
                    first = piece.tensor_offset // tensor.element_size()
                    place.copy_(tensor.view(-1)[first : first + place.numel()])
            with plan.naming(number):
                sender.post(plan.filled(number))
        tensor = None
        if (extra := next(named_tensors, None)) is not None:
            raise ValueError(f"the learner exported {extra[0]} after all {len(plan.tensors)} tensors of the plan")
        last = len(plan.buckets) - 1
        with plan.naming(max(last + 1 - self._under_way, 0)):
            sender.buffer()  # so that an error of the last two buckets names the right one
        with plan.naming(last):
            sender.finish()


def _checked(named_tensor: tuple[str, Tensor] | None, spec: TensorSpec) -> Tensor:
    """Give the tensor, if it is the one that was planned."""
    if named_tensor is None:
        raise ValueError(f"the learner exported no {spec.name}, which the plan has next")
    name, tensor = named_tensor
    found = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if found != (spec.name, spec.dtype, spec.shape):
        raise ValueError(f"the learner exported {found} where the plan has {(spec.name, spec.dtype, spec.shape)}")
    return tensor.detach()
