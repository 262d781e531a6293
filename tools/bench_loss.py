"""Time and peak memory of lm_head + loss, forward and backward: the fused loss against dense logits and softmax.

    python tools/bench_loss.py                      # both vocabularies, bf16
    python tools/bench_loss.py --vocab 49152 --dtype fp32 --json out.json
    python tools/bench_loss.py --peers-dir DIR --swift-python PY --trl-python PY    # beside the peers' losses

Each case runs in a process of its own, and with peers every case twice, in turn, since the machine's speed drifts.
Memory is the high-water mark of the resident set during an iteration less the set before it, with inputs in place; it
includes the gradients of hidden states and head. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.config import GkdObjective, LearnerConfig
from opd.learner.fused_loss import LossTargets, fused_head_loss
from opd.learner.objectives import gkd_loss

MIB = 2**20


def rss(key: str) -> int:
    """Give a figure of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def dense(
    hidden: Tensor, weight: Tensor, targets: LossTargets, objective: GkdObjective, main_grad: Tensor | None
) -> Tensor:
    """The loss as it is usually written: all logits, log-softmax in fp32, autograd."""
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    picked = logprobs.gather(1, targets.ids)
    loss = gkd_loss(
        picked[:, :-1], picked[:, -1], targets.teacher_topk, targets.from_dataset, weight.shape[0], objective
    )
    return loss.mean()


def fused(
    hidden: Tensor, weight: Tensor, targets: LossTargets, objective: GkdObjective, main_grad: Tensor | None
) -> Tensor:
    """The learner's loss."""
    scale, chunk = 1 / len(hidden), LearnerConfig().loss_chunk_tokens
    return fused_head_loss(hidden, weight, targets, objective, scale=scale, chunk_tokens=chunk, main_grad=main_grad)[0]


LOSSES: dict[str, Callable[[Tensor, Tensor, LossTargets, GkdObjective, Tensor | None], Tensor]] = {
    "dense": dense,
    "fused": fused,
}

PEER_LOSSES: dict[str, tuple[str, list[str]]] = {
    "liger_compiled": ("trl", ["--impl=liger_compiled"]),
    "swift_top64": ("swift", ["--impl=swift_given", "--k=64"]),
    "trl": ("trl", ["--impl=trl_gkd"]),
}
"""Whose environment has it, and the options of the peers' script."""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run one case in this process."""
    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=g)
    weight = torch.randn(args.vocab, args.hidden, generator=g) * 0.1  # logits with a standard deviation of 2.4
    teacher = hidden + 0.3 * torch.randn(hidden.shape, generator=g)
    parts = [(h @ weight.T).log_softmax(-1).topk(args.k) for h in teacher.split(256)]
    token = torch.randint(0, args.vocab, (args.tokens, 1), generator=g)
    targets = LossTargets(
        ids=torch.cat([torch.cat([p.indices for p in parts]), token], 1),
        teacher_topk=torch.cat([p.values for p in parts]),
        from_dataset=torch.ones(args.tokens, dtype=torch.bool),
        sampling=torch.full((args.tokens,), torch.nan),
    )
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    del teacher, parts
    main_grad = torch.zeros_like(weight, dtype=torch.float32) if args.main_grad else None
    base, seconds, peak, loss = rss("VmRSS"), [], 0, 0.0
    for _ in range(args.iterations + 1):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        started = time.perf_counter()
        value = LOSSES[args.case](hidden, weight, targets, GkdObjective(beta=0.5, top_k=args.k), main_grad)
        value.backward()
        if main_grad is not None and weight.grad is not None:
            main_grad.add_(weight.grad)
        seconds.append(time.perf_counter() - started)
        peak = max(peak, rss("VmHWM") - base)
        loss = value.item()
        hidden.grad = weight.grad = None
    return {
        "case": args.case,
        "dtype": args.dtype,
        "vocab": args.vocab,
        "seconds": statistics.median(seconds[1:]),
        "runs": [round(s, 3) for s in seconds[1:]],
        "peak_mib": peak / MIB,
        "loss": loss,
    }


def run_case(case: str, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one of our cases in a process of its own."""
    options = {"case": case, "vocab": vocab, **{n: vars(args)[n] for n in ("tokens", "hidden", "k", "dtype")}}
    options |= {"iterations": args.iterations, "threads": args.threads}
    command = [sys.executable, __file__, *(f"--{n}={v}" for n, v in options.items())]
    command += ["--main-grad"] * args.main_grad
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def run_peer(case: str, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a peer's loss through the script in `--peers-dir`, under the interpreter of its own environment."""
    peer, options = PEER_LOSSES[case]
    sizes = {"n": args.tokens, "h": args.hidden, "v": vocab, "iters": args.iterations, "dtype": args.dtype}
    command = [vars(args)[f"{peer}_python"], args.peers_dir / "loss_bench.py", *options]
    command += [f"--{n}={v}" for n, v in sizes.items()]
    env = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=env)
    report = json.loads(done.stdout.splitlines()[-1])
    return {
        "case": case,
        "dtype": args.dtype,
        "vocab": vocab,
        "seconds": report["fwd_bwd_s"],
        "runs": report["all_s"][1:],
        "peak_mib": report["peak_delta_mib"],
        "loss": report["loss"],
    }


def merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Give one row for the rows of one case: median over all their runs, the highest memory."""
    runs = [second for row in rows for second in row["runs"]]
    peak = max(row["peak_mib"] for row in rows)
    return {**rows[0], "seconds": statistics.median(runs), "runs": runs, "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=LOSSES, help="run this case in this process and print JSON")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, action="append", help="default: 49152 and 151936")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--main-grad", action="store_true", help="add the head's gradient to a buffer that exists")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--peers-dir", type=Path, help="folder of loss_bench.py")
    parser.add_argument("--swift-python", type=Path, help="interpreter that has ms-swift")
    parser.add_argument("--trl-python", type=Path, help="interpreter that has trl and liger-kernel")
    args = parser.parse_args()
    if args.peers_dir and not (args.swift_python and args.trl_python):
        parser.error("--peers-dir needs --swift-python and --trl-python")
    vocabularies = args.vocab or [49152, 151936]
    if args.case:
        args.vocab = vocabularies[0]
        print(json.dumps(measure(args)))
        return
    cases = [*LOSSES, *(PEER_LOSSES if args.peers_dir else [])]
    results = []
    print(f"{'case':14}{'dtype':7}{'V':>8}{'seconds':>10}{'peak MiB':>10}{'loss':>10}")
    for vocab in vocabularies:
        rounds = [
            [(run_case if case in LOSSES else run_peer)(case, vocab, args) for case in cases]
            for _ in range(2 if args.peers_dir else 1)
        ]
        rows = [merged(of_case) for of_case in zip(*rounds, strict=True)]
        for row in rows:
            figures = f"{row['seconds']:>10.2f}{row['peak_mib']:>10.0f}{row['loss']:>10.5f}"
            print(f"{row['case']:14}{row['dtype']:7}{vocab:>8}{figures}", flush=True)
        ours = next(row for row in rows if row["case"] == "fused")
        for row in rows:
            if row is not ours:
                time_ratio, memory_ratio = ours["seconds"] / row["seconds"], ours["peak_mib"] / row["peak_mib"]
                print(f"fused/{row['case']}: time {time_ratio:.2f}, memory {memory_ratio:.3f}")
        results += rows
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
