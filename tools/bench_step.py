"""Measure an optimiser step, off- or on-policy: seconds of each stage, tokens per second, peak memory of each process.

    python tools/bench_step.py --student DIR --teacher DIR --data gsm8k/train.jsonl --rows 16 --max-tokens 512 \
        --steps 5 --dtype bf16 --json out.json
    python tools/bench_step.py ... --on-policy --new-tokens 128 [--max-staleness N] [--num-engines N]

It is an ordinary run of `opd` (real vLLM, Megatron, Ray) without evaluation, in file order, so that
other systems can be given the same rows. The first step is warm-up and left out of the medians. `tools/bench_peers.py`
runs this beside TRL and ms-swift.

On-policy the student answers the rows' prompts, and its engines get the new weights after every step. With
`--max-staleness N` the answers of N coming steps are begun in the first one, and none are in the last N: those are left
out too, and means take the place of medians, since steps that wait for answers alternate with steps that find them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from opd.config import (
    DataConfig,
    GkdObjective,
    LearnerConfig,
    LoopConfig,
    RolloutConfig,
    RunConfig,
    StudentConfig,
    TeacherConfig,
    WeightSyncConfig,
)
from opd.device import HostProfile
from opd.plan import make_plan
from opd.run import new_run_folder
from opd.session import run

RATES = ("speed/total_tokens_per_s", "speed/trained_tokens_per_s")
"""Per second of a whole step."""


def config(args: argparse.Namespace, output_dir: Path) -> RunConfig:
    """Give the run: the peers' settings where they have a counterpart."""
    rollout = weight_sync = None
    if args.on_policy:
        rollout = RolloutConfig(
            max_new_tokens=args.new_tokens,
            max_staleness=args.max_staleness,
            num_engines=args.num_engines,
            max_running=args.rows * (1 + args.max_staleness),
        )
        weight_sync = WeightSyncConfig(every_steps=1, parity_every=0)  # probes in the first and the last sync only
    return RunConfig(
        name="bench-step",
        output_dir=output_dir,
        student=StudentConfig(model=args.student),
        teachers=[TeacherConfig(model=args.teacher, dtype=args.dtype, scoring=args.scoring)],
        data=DataConfig(
            source=args.data,
            max_rows=args.rows * args.steps,
            heldout_rows=0,
            max_prompt_tokens=args.max_tokens // 2,
            max_response_tokens=args.max_tokens // 2,
            overlong_response="truncate",
            shuffle=False,
            max_refused_share=1.0,
        ),
        rollout=rollout,
        weight_sync=weight_sync,
        objective=GkdObjective(beta=args.beta, top_k=args.top_k),
        learner=LearnerConfig(
            dtype=args.dtype,
            lr=1e-5,
            schedule="constant",
            max_tokens_per_microbatch=args.microbatch_tokens,
            data_parallel=args.data_parallel,
        ),
        run=LoopConfig(max_steps=args.steps, samples_per_step=args.rows, prefetch_steps=args.prefetch, eval_every=0),
    )


def summarise(lines: list[dict[str, Any]], *, on_policy: bool, max_staleness: int) -> dict[str, Any]:
    """Give what a step takes, on average over the timed ones; see the module."""
    steps = [line for line in lines if "time/step_s" in line]
    timed = steps[1 + max_staleness : len(steps) - max_staleness]
    seconds = [step["time/step_s"] for step in timed]

    def average(name: str) -> float:
        values = [step[name] for step in timed]
        if not max_staleness:
            return round(statistics.median(values), 4)
        # A rate is per second of its step, so that the mean is all tokens by all seconds.
        return round(statistics.fmean(values, seconds if name in RATES else None), 4)

    result = {
        "steps_timed": len(timed),
        "step_s": average("time/step_s"),
        "score_s": average("time/score_s"),
        "learn_s": average("time/learn_s"),
        "total_tokens_per_s": average("speed/total_tokens_per_s"),
        "trained_tokens_per_s": average("speed/trained_tokens_per_s"),
        "trained_tokens": average("batch/trained_tokens"),
    }
    parts = ["driver", "learner", "scorer"]
    if on_policy:
        parts.append("rollout")
        result |= {
            "rollout_s": average("time/rollout_s"),
            "sync_s": average("time/sync_s"),
            "generated_tokens_per_s": average("speed/rollout_tokens_per_s"),
        }
    return {
        **result,
        "peak_memory_gib": {part: steps[-1][f"memory/{part}_gib"] for part in parts},
        "loss": [step["loss/total"] for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="builtin:smollm2-pruned-20")
    parser.add_argument("--teacher", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--data", required=True, help="a GSM8K-like file: columns question and answer")
    parser.add_argument("--rows", type=int, default=16, help="samples of a step")
    parser.add_argument("--max-tokens", type=int, default=512, help="of prompt and response, half each")
    parser.add_argument("--steps", type=int, default=5, help="the first is warm-up")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--scoring", choices=["hidden_states", "prompt_logprobs"], default="hidden_states")
    parser.add_argument("--microbatch-tokens", type=int, default=1024)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--on-policy", action="store_true", help="the student answers; its engines are synced")
    parser.add_argument("--new-tokens", type=int, default=128, help="on-policy: longest answer")
    parser.add_argument("--max-staleness", type=int, default=0, help="on-policy: as rollout.max_staleness")
    parser.add_argument("--num-engines", type=int, default=1, help="on-policy: student engines")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    if not args.on_policy and (args.max_staleness or args.num_engines > 1):
        parser.error("--max-staleness and --num-engines are for --on-policy")
    if args.steps < (fewest := 2 + 2 * args.max_staleness):
        parser.error(f"--steps must be at least {fewest}: warm-up, and what cannot be timed with that staleness")
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(config(args, Path(folder)), HostProfile.detect())
        run_folder = new_run_folder(plan.config)
        asyncio.run(run(plan, run_folder))
        lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    result = summarise(lines, on_policy=args.on_policy, max_staleness=args.max_staleness)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
