"""Buckets: every byte once, aligned, in order; and the comparison of a plan with a model."""

from __future__ import annotations

import json
import pickle

import pytest

from opd.weight_sync.channel import ChannelInfo, init_info, parse_init_info
from opd.weight_sync.plan import ALIGNMENT, SyncPlan, TensorSpec, check, make_plan

TENSORS = (
    TensorSpec("embed", "float32", (100, 7)),  # 2800 bytes
    TensorSpec("norm", "bfloat16", (3,)),  # 6
    TensorSpec("q", "float32", (5, 5)),  # 100
    TensorSpec("k", "bfloat16", (1, 32)),  # 64
)


def _assert_whole(plan: SyncPlan) -> None:
    covered = dict.fromkeys(range(len(plan.tensors)), 0)
    previous = -1
    for number, bucket in enumerate(plan.buckets):
        end = 0
        for piece in bucket:
            assert piece.bucket_offset >= end
            assert piece.bucket_offset % ALIGNMENT == 0
            assert piece.tensor_offset == covered[piece.tensor]
            assert piece.tensor >= previous
            covered[piece.tensor] += piece.nbytes
            end = piece.bucket_offset + piece.nbytes
            previous = piece.tensor
        assert end == plan.filled(number) <= plan.bucket_bytes
    assert covered == {i: spec.nbytes for i, spec in enumerate(plan.tensors)}
    assert plan.filled(len(plan.buckets)) == 0


@pytest.mark.parametrize("bucket_bytes", [64, 65, 128, 192, 1000, 2800, 2816, 2880, 4096, 2**20])
def test_every_byte_lies_in_one_bucket(bucket_bytes: int) -> None:
    plan = make_plan(TENSORS, bucket_bytes)
    _assert_whole(plan)
    assert plan.total_bytes == 2970
    assert plan.bucket_bytes <= bucket_bytes


def test_a_bucket_is_no_larger_than_the_weights() -> None:
    plan = make_plan(TENSORS, 2**30)
    assert len(plan.buckets) == 1
    assert plan.bucket_bytes == 3072  # 2816 + 64 + 128 + 64


def test_only_what_is_larger_than_a_bucket_is_split() -> None:
    """The receiver would have to put it together in memory of its own."""
    plan = make_plan(
        [TensorSpec(n, "float32", (size,)) for n, size in zip("abcd", (100, 200, 300, 100), strict=True)], 1024
    )
    pieces = [[(piece.tensor, piece.nbytes) for piece in bucket] for bucket in plan.buckets]
    assert pieces == [[(0, 400)], [(1, 800), (2, 192)], [(2, 1008)], [(3, 400)]]


def test_a_tensor_as_large_as_the_bucket_is_not_split() -> None:
    plan = make_plan([TensorSpec("a", "float32", (16,)), TensorSpec("b", "float32", (16,))], 64)
    assert [len(bucket) for bucket in plan.buckets] == [1, 1]


@pytest.mark.parametrize(
    ("tensors", "bucket_bytes", "message"),
    [
        (TENSORS, 63, "make buckets larger"),
        ((), 64, "no tensors"),
        ((TENSORS[0], TENSORS[0]), 64, "a name may come once"),
    ],
)
def test_what_cannot_be_planned(tensors: tuple[TensorSpec, ...], bucket_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(tensors, bucket_bytes)


def test_what_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="int8"):
        TensorSpec("a", "int8", (1,))
    with pytest.raises(ValueError, match="holds nothing"):
        TensorSpec("a", "float32", (0, 4))


def test_a_plan_survives_pickle_and_json() -> None:
    plan = make_plan(TENSORS, 1000)
    channel = ChannelInfo(
        kind="gloo", name="c", host="h", port=1, receivers=("a", "b"), bucket_bytes=plan.bucket_bytes, timeout_s=5.0
    )
    assert pickle.loads(pickle.dumps((plan, channel))) == (plan, channel)
    sent = json.loads(json.dumps(init_info(channel, plan, first_receiver=1)))
    assert parse_init_info(sent) == (channel, plan, 1)


def test_check_names_every_kind_of_difference() -> None:
    check(make_plan(TENSORS, 64), TENSORS[::-1], "engine 0")
    expected = [
        TENSORS[0],
        TensorSpec("norm", "float32", (3,)),
        TensorSpec("q", "float32", (25,)),
        *(TensorSpec(f"bias{i}", "float32", (1,)) for i in range(6)),
    ]
    plan = make_plan([*TENSORS, TensorSpec("lm_head.weight", "float32", (100, 7))], 64)
    with pytest.raises(ValueError, match="engine 0") as caught:
        check(plan, expected, "engine 0")
    message = str(caught.value)
    assert "lm_head.weight would be sent, but the engine's model ties its head" in message
    assert "6 of 9 tensors would not be sent: bias0, bias1, bias2, bias3 and 2 more" in message
    assert "1 of 9 tensors unknown to the engine: k" in message
    assert "1 of 9 tensors of another shape: q (5, 5) for (25,)" in message
    assert "1 of 9 tensors of another dtype: norm bfloat16 for float32" in message


def test_an_error_of_the_channel_names_its_tensors() -> None:
    plan = make_plan(TENSORS, 2816)
    with pytest.raises(TimeoutError, match=r"^late \(bucket 2 of 2: norm to k\)$"), plan.naming(1):
        raise TimeoutError("late")
