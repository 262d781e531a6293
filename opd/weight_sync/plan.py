"""What a sync sends, in which order, and where in which bucket every byte lies. Both sides compute the same plan.

    tensors   embed_tokens ───────────────┐ layernorm ┐ q_proj ──────┐ ...
    buckets   [  0: embed_tokens (part)  ][ 1: embed_tokens (rest), layernorm, q_proj (part) ][ 2: ... ]

Only the filled part of a bucket is sent. Imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes: where tensors begin in a bucket, and where a tensor that does not fit is cut."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
REFUSAL = "the learner's weights do not fit the model of"
"""How the message of `check` begins: vLLM turns an error of a worker process into a RuntimeError with its text."""
SHOWN = 4
"""Tensors of one kind that a message names before it only counts."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor under its Hugging Face name, whole."""

    name: str
    dtype: str
    """float32 or bfloat16"""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON gives a list
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name} has dtype {self.dtype}; weights are sent as {' or '.join(ITEM_BYTES)}")
        if not self.nbytes:
            raise ValueError(f"{self.name} has shape {self.shape}, so it holds nothing that could be sent")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or part of one, in a bucket; offsets and size in bytes."""

    tensor: int
    """Index into the plan's tensors."""
    tensor_offset: int
    bucket_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """Where every tensor lies."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    """Of a full bucket."""
    buckets: tuple[tuple[Piece, ...], ...]

    def filled(self, bucket: int) -> int:
        """Give how many bytes of a bucket are sent; 0 after the last."""
        if bucket >= len(self.buckets):
            return 0
        last = self.buckets[bucket][-1]
        return last.bucket_offset + last.nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, once."""
        return sum(spec.nbytes for spec in self.tensors)

    @contextmanager
    def naming(self, bucket: int) -> Iterator[None]:
        """Add to an error of a channel which tensors it was about."""
        try:
            yield
        except (TimeoutError, ConnectionError) as error:
            pieces = self.buckets[bucket]
            first, last = (self.tensors[piece.tensor].name for piece in (pieces[0], pieces[-1]))
            what = first if first == last else f"{first} to {last}"
            # In the text, since notes are lost on the way out of vLLM's worker processes.
            raise type(error)(f"{error} (bucket {bucket + 1} of {len(self.buckets)}: {what})") from error


def make_plan(tensors: Sequence[TensorSpec], bucket_bytes: int) -> SyncPlan:
    """Fill buckets with tensors, in order.

    Args:
        tensors: All that the learner sends.
        bucket_bytes: Size of a bucket; rounded down to the alignment, and no larger than what there is to send.

    Raises:
        ValueError: A name comes twice, there are no tensors, or a bucket would hold nothing.
    """
    if len(names := {spec.name for spec in tensors}) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors have {len(names)} different names; a name may come once")
    if not tensors:
        raise ValueError("there are no tensors to send")
    size = bucket_bytes // ALIGNMENT * ALIGNMENT
    if not size:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, less than {ALIGNMENT}; make buckets larger")
    buckets: list[list[Piece]] = [[]]
    end = 0
    for index, spec in enumerate(tensors):
        offset = 0
        while offset < spec.nbytes:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            # One that fits in a bucket is not split: the receiver would have to copy it together.
            if start == size or (not offset and start + spec.nbytes > size >= spec.nbytes):
                buckets.append([])
                start = 0
            nbytes = min(spec.nbytes - offset, size - start)
            buckets[-1].append(Piece(tensor=index, tensor_offset=offset, bucket_offset=start, nbytes=nbytes))
            offset += nbytes
            end = start + nbytes
    largest = size if len(buckets) > 1 else -(-end // ALIGNMENT) * ALIGNMENT
    return SyncPlan(tensors=tuple(tensors), bucket_bytes=largest, buckets=tuple(map(tuple, buckets)))


def check(plan: SyncPlan, expected: Sequence[TensorSpec], whom: str) -> None:
    """Compare a plan with what a model is made of.

    Args:
        plan: What the learner would send.
        expected: What the model needs.
        whom: Names the model's owner in the message.

    Raises:
        ValueError: They differ; the message has every kind of difference.
    """
    sent = {spec.name: spec for spec in plan.tensors}
    needed = {spec.name: spec for spec in expected}
    both = [(sent[name], needed[name]) for name in sent if name in needed]
    unknown = [name for name in sent if name not in needed]
    faults = []
    if "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")
        faults.append(
            "lm_head.weight would be sent, but the engine's model ties its head to the embeddings; "
            "set tie_word_embeddings alike on both sides"
        )
    for kind, found in (
        ("would not be sent", [name for name in needed if name not in sent]),
        ("unknown to the engine", unknown),
        ("of another shape", [f"{s.name} {s.shape} for {n.shape}" for s, n in both if s.shape != n.shape]),
        ("of another dtype", [f"{s.name} {s.dtype} for {n.dtype}" for s, n in both if s.dtype != n.dtype]),
    ):
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            faults.append(f"{len(found)} of {len(needed)} tensors {kind}: {', '.join(found[:SHOWN])}{more}")
    if faults:
        raise ValueError(f"{REFUSAL} {whom}; nothing was sent: {'; '.join(faults)}")
