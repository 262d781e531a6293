"""The rules of the layout: what may import what, and where a device may be asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("data", "rollout", "score", "learner", "weight_sync")
LIGHT = ("opd.config", "opd.types", "opd.protocols", "opd.recipes", "opd.loop")
HEAVY = ("ray", "vllm", "megatron", "torch")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Give the modules that a file imports anywhere in it, as `opd.score.head`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_light_modules_pull_in_nothing_heavy() -> None:
    script = f"import sys, {', '.join(LIGHT)}; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_plan_needs_no_engine() -> None:
    script = f"import sys, opd.plan; print(*[m for m in {HEAVY[:3]} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("part", [p for p in PARTS if (ROOT / "opd" / p).is_dir()])
def test_parts_never_import_each_other(part: str) -> None:
    others = tuple(f"opd.{other}." for other in PARTS if other != part)
    found = [
        f"{p.relative_to(ROOT)}: {m}"
        for p in _files(ROOT / "opd" / part)
        for m in _imports(p)
        if f"{m}.".startswith(others)
    ]
    assert found == []


def test_unit_tests_import_no_engine() -> None:
    found = [
        f"{p.name}: {m}" for p in _files(ROOT / "tests" / "unit") for m in _imports(p) if m.split(".")[0] in HEAVY[:3]
    ]
    assert found == []


def test_only_the_device_module_the_learner_and_nccl_ask_for_cuda() -> None:
    opd = ROOT / "opd"
    allowed = {opd / "device.py", opd / "weight_sync" / "nccl.py", *_files(opd / "learner")}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in _files(ROOT / "opd")
        if path not in allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"))
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"))
    ]
    assert found == []
