"""Measure an off-policy optimiser step: seconds of each stage, tokens per second, peak memory of each process.

    python tools/bench_step.py --student DIR --teacher DIR --data gsm8k/train.jsonl --rows 16 --max-tokens 512 \
        --steps 5 --dtype bf16 --json out.json

It is an ordinary run of `opd` (real vLLM, Megatron, Ray) without evaluation, in file order, so that
other systems can be given the same rows. The first step is warm-up and left out of the medians. `tools/bench_peers.py`
runs this beside TRL and ms-swift.
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

from opd.config import DataConfig, GkdObjective, LearnerConfig, LoopConfig, RunConfig, StudentConfig, TeacherConfig
from opd.device import HostProfile
from opd.plan import make_plan
from opd.run import new_run_folder
from opd.session import run


def config(args: argparse.Namespace, output_dir: Path) -> RunConfig:
    """Give the run: the peers' settings where they have a counterpart."""
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


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the medians of all steps but the first."""
    steps = [line for line in lines if "time/step_s" in line][1:]

    def median(name: str) -> float:
        return round(statistics.median(step[name] for step in steps), 4)

    return {
        "steps_timed": len(steps),
        "step_s": median("time/step_s"),
        "score_s": median("time/score_s"),
        "learn_s": median("time/learn_s"),
        "total_tokens_per_s": median("speed/total_tokens_per_s"),
        "trained_tokens_per_s": median("speed/trained_tokens_per_s"),
        "trained_tokens": median("batch/trained_tokens"),
        "peak_memory_gib": {part: steps[-1][f"memory/{part}_gib"] for part in ("driver", "learner", "scorer")},
        "loss": [line["loss/total"] for line in lines if "loss/total" in line],
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
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(config(args, Path(folder)), HostProfile.detect())
        run_folder = new_run_folder(plan.config)
        asyncio.run(run(plan, run_folder))
        lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    result = summarise(lines)
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
