"""Scored samples into microbatches of bounded size, spread evenly over data-parallel ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from opd.types import Microbatch, Sample, TrainBatch


def pack(samples: Sequence[Sample], *, data_parallel: int, max_tokens: int) -> TrainBatch:
    """Lay scored samples end to end; each goes to exactly one microbatch of one rank.

    Args:
        samples: scored, all with the same K.
        data_parallel: ranks; the longest samples are dealt out first, each to the rank with the fewest tokens.
        max_tokens: of one microbatch.

    Raises:
        ValueError: a sample has no score, or more than `max_tokens` tokens.
    """
    for sample in samples:
        if sample.score is None:
            raise ValueError(f"{sample.sample_id} has no teacher score; score samples before packing them")
        if sample.num_tokens > max_tokens:
            raise ValueError(
                f"learner.max_tokens_per_microbatch is {max_tokens} but {sample.sample_id} has {sample.num_tokens} "
                "tokens; raise it or lower data.max_prompt_tokens and data.max_response_tokens"
            )
    longest_first = sorted(samples, key=lambda s: -s.num_tokens)
    ranks: list[list[Sample]] = [[] for _ in range(data_parallel)]
    loads = [0] * data_parallel
    for sample in longest_first:
        rank = loads.index(min(loads))
        ranks[rank].append(sample)
        loads[rank] += sample.num_tokens
    batches = tuple(tuple(lay_out(bin_) for bin_ in _fill(rank, max_tokens)) for rank in ranks)
    return TrainBatch(
        ranks=batches,
        trained_tokens=sum(m.num_trained_tokens for rank in batches for m in rank),
        total_tokens=sum(loads),
        num_samples=len(samples),
    )


def _fill(longest_first: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Put each sample into the first microbatch with room for it (first-fit decreasing)."""
    bins: list[list[Sample]] = []
    room: list[int] = []
    for sample in longest_first:
        for i, free in enumerate(room):
            if sample.num_tokens <= free:
                bins[i].append(sample)
                room[i] -= sample.num_tokens
                break
        else:
            bins.append([sample])
            room.append(max_tokens - sample.num_tokens)
    return bins


def lay_out(samples: Sequence[Sample]) -> Microbatch:
    """Make one microbatch of scored samples."""
    lengths = [s.num_tokens for s in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    scores = [s.score for s in samples if s.score is not None]
    masks = [s.loss_mask for s in samples]
    predict = [
        start + len(s.prompt_ids) - 1 + np.flatnonzero(s.loss_mask)
        for start, s in zip(starts[:-1], samples, strict=True)
    ]
    pairs = list(zip(scores, masks, strict=True))
    return Microbatch(
        input_ids=np.concatenate([ids for s in samples for ids in (s.prompt_ids, s.response_ids)]).astype(np.int64),
        position_ids=np.concatenate([np.arange(n) for n in lengths]).astype(np.int64),
        cu_seqlens=starts.astype(np.int32),
        predict_positions=np.concatenate(predict).astype(np.int64),
        target_ids=np.concatenate([s.response_ids[m] for s, m in zip(samples, masks, strict=True)]).astype(np.int64),
        topk_ids=np.concatenate([score.topk_ids[m] for score, m in pairs]).astype(np.int64),
        topk_logprobs=np.concatenate([score.topk_logprobs[m] for score, m in pairs]),
        token_logprobs=np.concatenate([score.token_logprobs[m] for score, m in pairs]),
        from_dataset=np.concatenate(
            [np.full(m.sum(), s.source == "dataset") for s, m in zip(samples, masks, strict=True)]
        ),
        sampling_logprobs=np.concatenate([_sampling_logprobs(s)[s.loss_mask] for s in samples]),
    )


def _sampling_logprobs(sample: Sample) -> NDArray[np.float32]:
    """Give [R], NaN where nothing was sampled."""
    if sample.rollout is None:
        return np.full(len(sample.response_ids), np.nan, dtype=np.float32)
    return sample.rollout.sampling_logprobs
