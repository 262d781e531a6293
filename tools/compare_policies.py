"""On-policy against off-policy distillation from the same start, on an embedded task: table, plot, docs/results.md.

    python tools/compare_policies.py --place FOLDER --run      # what is not there yet; can be interrupted
    python tools/compare_policies.py --place FOLDER --report   # docs/results.md and docs/results/*.svg

Everything is an ordinary `python -m opd.run recipes/gkd_mixed.py --set ...`, printed before it begins:

    teacher   SmolLM2-135M-Instruct, fine-tuned on the task by cross-entropy
    start     the pruned student, distilled from that teacher for a few steps on data set answers
    off-S, on-S   the start, distilled further: from data set answers, or from its own; seeds S = 0, 1, 2

An arm pair of one seed sees the same prompts in the same order, for the same number of optimiser steps. Both have
rollout engines, which answer the held-out prompts greedily: off-policy is `rollout.on_policy_fraction=0`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.checkpoint import CheckpointStore

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
SEEDS = (0, 1, 2)
ARMS = {"off": "off-policy", "on": "on-policy"}
METRICS = {
    "heldout/accuracy": "accuracy of greedy answers",
    "heldout/own_reverse_kl": "reverse KL on own answers, nats/token",
    "heldout/reverse_kl": "reverse KL on data set answers, nats/token",
    "heldout/own_forward_kl": "forward KL on own answers, nats/token",
    "heldout/forward_kl": "forward KL on data set answers, nats/token",
}
TASK = {
    "data.source": "reasoning_gym:number_filtering",
    "data.task_options": {
        "min_numbers": 4,
        "max_numbers": 8,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 9,
    },
    "data.response_column": "answer",
    "data.grader": "reasoning_gym",
    "data.max_prompt_tokens": 128,
    "data.max_response_tokens": 64,
    "rollout.max_new_tokens": 64,
    "rollout.heldout_temperature": 0.0,
    "learner.max_tokens_per_microbatch": 1024,
    "run.save_every": 0,
    "run.keep_last": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the comparison."""

    name: str
    settings: Mapping[str, Any]

    def command(self, place: Path) -> list[str]:
        """Give the command line."""
        settings = {**TASK, **self.settings, "output_dir": str(place), "name": self.name}
        pairs = [f"{key}={json.dumps(v) if isinstance(v, dict) else v}" for key, v in settings.items()]
        return ["-m", "opd.run", "recipes/gkd_mixed.py", *(arg for pair in pairs for arg in ("--set", pair))]


def jobs(place: Path, steps: int) -> list[Job]:
    """Give the runs in the order in which they need each other."""
    base = "builtin:smollm2-135m-instruct"
    teacher, start = place / "teacher" / "student", place / "start" / "student"
    off_policy = {"rollout.on_policy_fraction": 0.0}
    tune = Job(
        name="teacher",
        settings={
            **off_policy,
            "student.model": base,
            "teachers.0.model": base,
            "objective.kd_weight": 0.0,
            "objective.ce_weight": 1.0,
            "learner.lr": 4e-4,
            "learner.warmup_steps": 10,
            "data.task_rows": 4000,
            "data.heldout_rows": 64,
            "rollout.heldout_answers": 64,
            "rollout.max_running": 64,
            "run.max_steps": 120,
            "run.samples_per_step": 16,
            "run.eval_every": 0,
            "run.seed": 101,
        },
    )
    distil = {
        "teachers.0.model": str(teacher),
        "learner.lr": 2e-4,
        "learner.warmup_steps": 3,
        "data.task_rows": 2000,
        "data.heldout_rows": 128,
        "rollout.heldout_answers": 128,
        "rollout.max_running": 128,
        "run.samples_per_step": 16,
    }
    begin = Job(
        name="start",
        settings={
            **distil,
            **off_policy,
            "student.model": "builtin:smollm2-pruned-20",
            "run.max_steps": 30,
            "run.eval_every": 0,
            "run.seed": 100,
        },
    )
    arms = [
        Job(
            name=f"{arm}-{seed}",
            settings={
                **distil,
                "rollout.on_policy_fraction": float(arm == "on"),
                "student.model": str(start),
                "run.max_steps": steps,
                "run.eval_every": steps // 4,
                "run.seed": seed,
            },
        )
        for seed in SEEDS
        for arm in ARMS
    ]
    return [tune, begin, *arms]


def is_done(place: Path, job: Job) -> bool:
    """Tell whether a run has come to its end."""
    return (place / job.name / "done").exists()


def run(place: Path, job: Job) -> None:
    """Carry a run out; give its student a name without a step."""
    folder = place / job.name
    if folder.exists():
        raise ValueError(f"{folder} is of a run that did not come to its end; remove it to repeat the run")
    command = job.command(place)
    print("python", shlex.join(command), flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    newest = CheckpointStore(folder / "checkpoints", keep_last=1).newest_whole()
    (folder / "student").symlink_to(newest.folder, target_is_directory=True)
    (folder / "done").touch()


def read(place: Path, name: str) -> dict[int, dict[str, float]]:
    """Give step → metrics of every held-out evaluation of a run."""
    lines = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "heldout/accuracy" in line}


def pooled(runs: Sequence[Mapping[int, Mapping[str, float]]], step: int, metric: str) -> str:
    """Give mean and standard deviation over the seeds."""
    values = [run[step][metric] for run in runs]
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def table(arms: Mapping[str, Sequence[Mapping[int, Mapping[str, float]]]], steps: Sequence[int]) -> list[str]:
    """Give the Markdown table: a line per metric and step, a column per arm."""
    lines = ["| held-out | step | " + " | ".join(ARMS.values()) + " |", "|---|---|" + "---|" * len(ARMS)]
    for metric, text in METRICS.items():
        for step in (steps[0], steps[len(steps) // 2], steps[-1]):
            cells = [pooled(arms[arm], step, metric) for arm in ARMS]
            lines.append(f"| {text} | {step} | " + " | ".join(cells) + " |")
    return lines


def plot(arms: Mapping[str, Sequence[Mapping[int, Mapping[str, float]]]], steps: Sequence[int], path: Path) -> None:
    """Draw every seed thinly and the mean strongly."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "opd"  # so that the same figures give the same file
    shown = list(METRICS)[:3]
    figure, axes = plt.subplots(1, len(shown), figsize=(4 * len(shown), 3.2), constrained_layout=True)
    for axis, metric in zip(axes, shown, strict=True):
        for colour, (arm, label) in zip(("tab:blue", "tab:orange"), ARMS.items(), strict=True):
            curves = [[run[step][metric] for step in steps] for run in arms[arm]]
            for curve in curves:
                axis.plot(steps, curve, color=colour, linewidth=0.7, alpha=0.5)
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(steps, means, color=colour, linewidth=2, label=label, marker="o", markersize=4)
        axis.set_title(METRICS[metric], fontsize=9)
        axis.set_xlabel("optimiser steps")
        axis.grid(alpha=0.3)
        if metric != "heldout/accuracy":
            axis.set_yscale("log")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def report(place: Path) -> None:
    """Write the part of docs/results.md between this tool's marks, and the plot."""
    arms = {arm: [read(place, f"{arm}-{seed}") for seed in SEEDS] for arm in ARMS}
    steps = sorted(arms["on"][0])
    teacher, start = read(place, "teacher"), read(place, "start")
    plot(arms, steps, RESULTS.parent / "results" / "policies.svg")
    before, after = min(teacher), max(teacher)
    lines = [
        f"Teacher: accuracy {teacher[before]['heldout/accuracy']:.3f} before and "
        f"{teacher[after]['heldout/accuracy']:.3f} after {after} steps of cross-entropy. Start: the pruned student, "
        f"accuracy {start[min(start)]['heldout/accuracy']:.3f} before and {start[max(start)]['heldout/accuracy']:.3f} "
        f"after {max(start)} steps on data set answers. Mean ± standard deviation over seeds "
        f"{', '.join(map(str, SEEDS))}:",
        "",
        *table(arms, steps),
        "",
        "![Held-out accuracy and reverse KL against optimiser steps](results/policies.svg)",
    ]
    begin, end = "<!-- compare_policies: made by the tool -->", "<!-- compare_policies: end -->"
    text = RESULTS.read_text()
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    RESULTS.write_text("\n".join([head + begin, *lines, end + tail]))
    print("\n".join(lines))


def main() -> int:
    """Run what is missing, or report."""
    parser = argparse.ArgumentParser(description="On-policy against off-policy from the same start.")
    parser.add_argument("--place", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--run", action="store_true", help="carry out the runs that are not there yet")
    parser.add_argument("--only", help="of those, this one")
    parser.add_argument("--report", action="store_true", help="write docs/results.md")
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps of each arm (default: 40)")
    args = parser.parse_args()
    place = args.place.resolve()
    if args.run:
        for job in jobs(place, args.steps):
            if args.only in (None, job.name) and not is_done(place, job):
                run(place, job)
    if args.report:
        report(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
