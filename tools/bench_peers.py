r"""Distillation steps of ms-swift, TRL and this repository, one after the other, in one table.

    python tools/bench_peers.py --peers-dir DIR --swift-python PY --trl-python PY \
        --student DIR --teacher DIR --data train.jsonl [--on-policy]

`--peers-dir` holds `swift_bench.py`, `trl_bench.py` and their `common.py`; each runs under the interpreter of its own
environment, `tools/bench_step.py` under this one. All three get the same student, teacher and rows: global batch 16,
512 tokens. Leave the machine alone meanwhile: on two cores one busy stranger slows a step three to five times.

Off-policy TRL is its GKDTrainer. With `--on-policy` the students answer 16 prompts with at most 128 tokens, sampled at
temperature 1 from all ids, and TRL is its DistillationTrainer, which is faster; `--only trl-gkd` measures the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).absolute().parent
ROWS, MAX_TOKENS = 16, 512
"""Fixed in the peers' scripts too: micro-batch 4, accumulation 4."""
NEW_TOKENS = 128
QUIET_CORES = 0.15
"""A step during which other processes used more cores than this counts as disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one system achieved: medians over its timed steps."""

    system: str
    step_s: float
    total_tokens_per_s: float
    trained_tokens_per_s: float
    """Positions that the loss trains on; prompts are left out."""
    generate_s: float
    """Of a step, in which the student answers; 0 off-policy."""
    peak_memory_gib: Mapping[str, float]
    """Peak of each process; shared pages count in every process that maps them."""
    disturbed_steps: str | None = None
    """Such as `1/4`; None where the system does not say."""

    @property
    def memory_gib(self) -> float:
        """Sum of the processes' peaks: never below what the system as a whole held at once."""
        return sum(self.peak_memory_gib.values())


def run_logged(command: Sequence[str | Path], log: Path, *, cwd: Path, env: Mapping[str, str]) -> None:
    """Run one benchmark to its end with its output in `log`; raise RuntimeError with the log's end if it fails."""
    with log.open("w") as out:
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT
        )
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{command[1]} exited with {done.returncode}; its last lines:\n{tail}")


def run_peer(script: Path, python: Path, args: argparse.Namespace, work: Path, *options: str) -> Measurement:
    """Run a peer's script and read the report that it appends to its output file."""
    out = work / "report.jsonl"
    # fmt: off
    command = [
        python, script, *options, "--student", args.student, "--teacher", args.teacher, "--gsm8k", args.data,
        "--lmbda", str(int(args.on_policy)), "--new-tokens", str(NEW_TOKENS), "--steps", str(args.steps),
        "--dtype", args.dtype, "--out", out,
    ]
    # fmt: on
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # the scripts' folder may be read-only
        "TMPDIR": str(work),
    }
    run_logged(command, work / "log.txt", cwd=work, env=env)
    report: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    timed = report["rows"][1:]  # the first step is warm-up, and left out of the report's medians too
    disturbed = sum(row["foreign_cores"] > QUIET_CORES for row in timed)
    return Measurement(
        system=report["peer"],
        step_s=report["step_s"],
        total_tokens_per_s=report["total_tok_s"],
        trained_tokens_per_s=report["resp_tok_s"],
        generate_s=report["gen_s"],
        peak_memory_gib={"trainer": report["peak_rss_gib"]},
        disturbed_steps=f"{disturbed}/{len(timed)}",
    )


def run_swift(args: argparse.Namespace, work: Path) -> Measurement:
    """Measure ms-swift's GKD."""
    return run_peer(args.peers_dir / "swift_bench.py", args.swift_python, args, work)


def run_trl(args: argparse.Namespace, work: Path) -> Measurement:
    """Measure TRL's trainer that is faster at the task."""
    trainer = "distillation" if args.on_policy else "gkd"  # the former is on-policy only
    return run_peer(args.peers_dir / "trl_bench.py", args.trl_python, args, work, "--trainer", trainer)


def run_trl_gkd(args: argparse.Namespace, work: Path) -> Measurement:
    """Measure TRL's GKDTrainer."""
    return run_peer(args.peers_dir / "trl_bench.py", args.trl_python, args, work, "--trainer", "gkd")


def run_opd(args: argparse.Namespace, work: Path) -> Measurement:
    """Measure this repository."""
    out = work / "report.json"
    # fmt: off
    command = [
        sys.executable, TOOLS / "bench_step.py", "--student", args.student, "--teacher", args.teacher,
        "--data", args.data, "--rows", str(ROWS), "--max-tokens", str(MAX_TOKENS), "--steps", str(args.steps),
        "--dtype", args.dtype, "--json", out,
        *(["--on-policy", "--new-tokens", str(NEW_TOKENS)] if args.on_policy else []),
    ]
    # fmt: on
    run_logged(command, work / "log.txt", cwd=TOOLS.parent, env={"HF_HUB_OFFLINE": "1"})
    report: dict[str, Any] = json.loads(out.read_text())
    return Measurement(
        system="opd",
        step_s=report["step_s"],
        total_tokens_per_s=report["total_tokens_per_s"],
        trained_tokens_per_s=report["trained_tokens_per_s"],
        generate_s=report.get("rollout_s", 0.0),
        peak_memory_gib={name: gib for name, gib in report["peak_memory_gib"].items() if gib is not None},
    )


SYSTEMS: Mapping[str, Callable[[argparse.Namespace, Path], Measurement]] = {
    "swift": run_swift,
    "trl": run_trl,
    "trl-gkd": run_trl_gkd,
    "opd": run_opd,
}
MEASURED_BY_DEFAULT = ("swift", "trl", "opd")


def ratios(results: Sequence[Measurement]) -> list[float | None]:
    """Give each system's trained tokens per second over the best peer's; None everywhere if no peer ran."""
    peers = [r.trained_tokens_per_s for r in results if r.system != "opd"]
    return [r.trained_tokens_per_s / max(peers) if peers else None for r in results]


def table(results: Sequence[Measurement]) -> str:
    """Lay the results out as one Markdown table, with what is worth knowing below it."""
    lines = [
        "| system | step s | of it answering s | total tok/s | trained tok/s | peak memory GiB | ratio to best peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for result, ratio in zip(results, ratios(results), strict=True):
        shown = "-" if ratio is None else f"{ratio:.2f}"
        lines.append(
            f"| {result.system} | {result.step_s:.2f} | {result.generate_s:.2f} | {result.total_tokens_per_s:.0f} | "
            f"{result.trained_tokens_per_s:.0f} | {result.memory_gib:.1f} | {shown} |"
        )
    lines += ["", "Medians over the steps after warm-up; the ratio is of trained tok/s."]
    for result in results:
        if len(result.peak_memory_gib) > 1:
            parts = ", ".join(f"{name} {gib:.1f}" for name, gib in result.peak_memory_gib.items())
            lines.append(f"Memory of {result.system} is the sum of its processes' peaks: {parts}.")
        if result.disturbed_steps and not result.disturbed_steps.startswith("0/"):
            lines.append(f"Disturbed steps of {result.system} (others used over {QUIET_CORES} cores): "
                         f"{result.disturbed_steps}. Measure again on an idle machine.")  # fmt: skip
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """Read the command line; paths come out absolute, since each benchmark runs in a folder of its own."""
    parser = argparse.ArgumentParser(description="Time a distillation step of ms-swift, TRL and this repository.")

    def path(text: str) -> Path:
        return Path(text).absolute()  # not resolve(): a venv's interpreter is a link, and works only as one

    def systems(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(SYSTEMS):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
        return names

    parser.add_argument("--peers-dir", type=path, help="folder of swift_bench.py and trl_bench.py")
    parser.add_argument("--swift-python", type=path, help="interpreter that has ms-swift")
    parser.add_argument("--trl-python", type=path, help="interpreter that has trl")
    parser.add_argument("--student", type=path, required=True, help="model folder in HF format")
    parser.add_argument("--teacher", type=path, required=True, help="model folder in HF format, same tokenizer")
    parser.add_argument("--data", type=path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each system, the warm-up one included")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--on-policy", action="store_true", help=f"the student answers, with {NEW_TOKENS} tokens")
    parser.add_argument(
        "--only",
        type=systems,
        default=list(MEASURED_BY_DEFAULT),
        help=f"comma-separated: {', '.join(SYSTEMS)}; default: {', '.join(MEASURED_BY_DEFAULT)}",
    )
    parser.add_argument("--json", type=path, help="also write the results here")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first is warm-up")
    for name, package in (("swift", "swift"), ("trl", "trl"), ("trl-gkd", "trl")):
        if name in args.only and not (args.peers_dir and vars(args)[f"{package}_python"]):
            parser.error(f"{name} needs --peers-dir and --{package}-python, or leave it out with --only")
    return args


def main() -> int:
    args = parse_args()
    results: list[Measurement] = []
    failed: list[str] = []
    for name, measure in SYSTEMS.items():
        if name not in args.only:
            continue
        kind = "on-policy" if args.on_policy else "off-policy"
        print(f"{name}: {args.steps} {kind} steps, {args.dtype} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"bench-{name}-") as work:
            try:
                results.append(measure(args, Path(work)))
            except (RuntimeError, OSError, LookupError, ValueError) as error:
                # the minutes spent on the others are not to be lost with this one
                print(f"{name} failed: {error}", file=sys.stderr)
                failed.append(name)
    if results:
        print(table(results))
    if args.json:
        rows = [{**asdict(r), "ratio": ratio} for r, ratio in zip(results, ratios(results), strict=True)]
        settings = {"steps": args.steps, "dtype": args.dtype, "on_policy": args.on_policy}
        args.json.write_text(json.dumps({**settings, "results": rows}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
