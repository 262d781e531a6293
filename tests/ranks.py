"""Runs learner ranks in fresh processes, so that Megatron's patches never reach the test process."""

from __future__ import annotations

import pickle
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.multiprocessing as mp

from opd.config import GkdObjective, LearnerConfig
from opd.types import Sample, TeacherScore


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Give what `function(rank, port, *args)` returned in each of `world` processes."""
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp())
    answers = [folder / str(rank) for rank in range(world)]
    processes = [
        context.Process(target=_answer, args=(path, function, rank, port, args), daemon=True)
        for rank, path in enumerate(answers)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_s)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
        return [pickle.loads(path.read_bytes()) for path in answers]
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder)


def _answer(path: Path, function: Callable[..., Any], rank: int, port: int, args: tuple[Any, ...]) -> None:
    path.write_bytes(pickle.dumps(function(rank, port, *args)))


def make_rank(
    rank: int,
    port: int,
    folder: Path,
    learner: LearnerConfig,
    objective: GkdObjective | None = None,
    steps: int = 10,
    vocab: int = 512,
) -> Any:
    """Give a `LearnerRank` that has joined its group; only in a process of `run_ranks`."""
    from opd.device import HostProfile
    from opd.learner.megatron import LearnerRank

    profile = HostProfile.cpu(num_cpus=1)
    made = LearnerRank(folder, learner, objective or GkdObjective(), steps, vocab, rank, profile, 1)
    if rank == 0:
        made.open_store("127.0.0.1", port)
    made.start("127.0.0.1", port)
    return made


def random_sample(i: int, vocab: int, k: int, prompt: int, response: int, seed: int = 0) -> Sample:
    """Give a scored sample of random ids with a proper random teacher distribution."""
    rng = np.random.default_rng([seed, i])
    logits = rng.normal(size=(response, vocab)) * 2
    logp = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    ids = np.argsort(-logp, axis=1)[:, :k].astype(np.int32)
    tokens = rng.integers(0, vocab, response).astype(np.int32)
    return Sample(
        sample_id=f"random:{i}",
        prompt_ids=rng.integers(0, vocab, prompt).astype(np.int32),
        response_ids=tokens,
        loss_mask=rng.random(response) < 0.8,
        finish_reason="stop",
        source="dataset",
        teacher="teacher",
        score=TeacherScore(
            token_logprobs=np.take_along_axis(logp, tokens[:, None], 1)[:, 0],
            topk_ids=ids,
            topk_logprobs=np.take_along_axis(logp, ids, 1),
            covered=(ids == tokens[:, None]).any(1),
        ),
    )
