"""The engine's side: tensors out of buckets, without a copy where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from opd.weight_sync.channel import BucketReceiver
from opd.weight_sync.plan import SyncPlan


def unpack(
    receiver: BucketReceiver, plan: SyncPlan, before_release: Callable[[Tensor], None]
) -> Iterator[tuple[str, Tensor]]:
    """Give all tensors of a plan, in order.

    A tensor that lies in one bucket is a view of it, valid until the bucket is released, and that happens when the
    iterator moves on to the next one. A tensor that was split is given in memory of its own.

    Args:
        receiver: Where the buckets come from.
        plan: Of the sender too.
        before_release: Called with a bucket, uint8 [n], before its memory is reused: the last moment to copy what is
            still needed of it. See `transfer_engine.py`, where vLLM needs a tensor until its whole layer is there.

    Raises:
        TimeoutError, ConnectionError: A bucket did not come; the message names its tensors.
    """
    whole: Tensor | None = None
    for number, bucket in enumerate(plan.buckets):
        with plan.naming(number):
            data = receiver.receive(plan.filled(number), plan.filled(number + 1))
        for piece in bucket:
            spec = plan.tensors[piece.tensor]
            part = data[piece.bucket_offset : piece.bucket_offset + piece.nbytes]
            if piece.nbytes < spec.nbytes:
                if whole is None:
                    whole = torch.empty(spec.nbytes, dtype=torch.uint8, device=data.device)
                whole[piece.tensor_offset : piece.tensor_offset + piece.nbytes].copy_(part)
                if piece.tensor_offset + piece.nbytes < spec.nbytes:
                    continue
                part, whole = whole, None
            yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)
        before_release(data)
        with plan.naming(number):
            receiver.release()
