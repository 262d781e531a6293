"""Checkpoints under crashes, full disks, damage, and the rules of what is kept."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from opd import checkpoint, durable
from opd.checkpoint import CheckpointStore
from opd.errors import CheckpointError

Write = Callable[[Path], Awaitable[None]]


async def write_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder / "training").mkdir()
    (folder / "training" / "rank-0.safetensors").write_bytes(b"s" * 3000)


def save(
    store: CheckpointStore,
    step: int,
    write: Write = write_weights,
    *,
    kl: float | None = None,
    needed_bytes: int = 0,
) -> Path:
    return asyncio.run(store.save(step, write, heldout_kl=kl, state={"rows": step * 8}, needed_bytes=needed_bytes))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, keep_last=2, run_name="a-run")


def test_saved_checkpoint_is_listed(store: CheckpointStore, folder: Path) -> None:
    assert save(store, 10, kl=0.5) == folder / "step-10"
    listing = store.list(deep=True)
    assert listing.damaged == {}
    (saved,) = listing.whole
    assert (saved.step, saved.heldout_kl, saved.state) == (10, 0.5, {"rows": 80})
    assert saved.saved_at.endswith("+00:00")
    manifest = json.loads((folder / "step-10" / "manifest.json").read_text())
    assert manifest["run"] == "a-run"
    assert manifest["files"]["training/rank-0.safetensors"]["bytes"] == 3000
    assert len(manifest["files"]["model.safetensors"]["sha256"]) == 64


def test_nothing_is_made_before_the_first_save(store: CheckpointStore, folder: Path) -> None:
    assert store.list().whole == []
    assert not folder.exists()


def test_newest_and_best_are_kept(store: CheckpointStore, folder: Path) -> None:
    for step, kl in [(5, 0.9), (10, 0.4), (15, 0.6), (20, None), (25, float("nan"))]:
        save(store, step, kl=kl)
    assert names(folder) == ["best", "step-10", "step-20", "step-25"]
    assert os.readlink(folder / "best") == "step-10"
    best = store.best()
    assert best is not None
    assert best.step == 10
    save(store, 30, kl=0.1)
    assert names(folder) == ["best", "step-25", "step-30"]
    assert os.readlink(folder / "best") == "step-30"


def test_steps_are_ordered_as_numbers(store: CheckpointStore) -> None:
    for step in (9, 10, 100):
        save(store, step)
    assert [c.step for c in store.list().whole] == [10, 100]
    assert store.newest_whole().step == 100


def test_newest_of_equally_good_ones_is_best(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, step, kl=0.5)
    best = store.best()
    assert best is not None
    assert best.step == 2


def test_same_step_again_replaces(store: CheckpointStore, folder: Path) -> None:
    async def write_other(aside: Path) -> None:
        assert (folder / "step-10" / "model.safetensors").read_bytes() == b"w" * 1000  # the old one is still there
        (aside / "model.safetensors").write_bytes(b"new")

    save(store, 10, kl=0.5)
    save(store, 10, write_other, kl=0.7)
    assert names(folder) == ["best", "step-10"]
    assert (folder / "step-10" / "model.safetensors").read_bytes() == b"new"
    assert store.newest_whole().heldout_kl == 0.7


def _fail(aside: Path, error: Exception) -> None:
    (aside / "model.safetensors").write_bytes(b"w" * 10)
    raise error


def test_full_disk_leaves_older_ones(store: CheckpointStore, folder: Path) -> None:
    async def write(aside: Path) -> None:
        _fail(aside, OSError(errno.ENOSPC, "No space left on device"))

    save(store, 1)
    save(store, 2)
    with pytest.raises(
        CheckpointError, match=r"step-3 could not be written: No space left on device; older .* as they were"
    ):
        save(store, 3, write)
    assert names(folder) == ["step-1", "step-2"]
    assert store.list(deep=True).damaged == {}


def test_disk_that_is_really_full(store: CheckpointStore, folder: Path) -> None:
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # rank-0.safetensors has 3,000 bytes
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(store, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == ["step-1"]
    assert store.newest_whole().step == 1


def test_failure_while_sealing_leaves_older_ones(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save(store, 1)
    monkeypatch.setattr(durable, "write_text_durably", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(store, 2)
    assert names(folder) == ["step-1"]


def test_any_other_failure_travels_and_leaves_nothing(store: CheckpointStore, folder: Path) -> None:
    async def write(aside: Path) -> None:
        _fail(aside, RuntimeError("rank 1 died"))

    save(store, 1)
    with pytest.raises(RuntimeError, match="rank 1 died"):
        save(store, 2, write)
    assert names(folder) == ["step-1"]


def test_cancelled_save_leaves_nothing(store: CheckpointStore, folder: Path) -> None:
    async def write(aside: Path) -> None:
        (aside / "model.safetensors").write_bytes(b"w" * 10)
        await asyncio.sleep(60)

    async def start_and_cancel() -> None:
        task = asyncio.create_task(store.save(2, write, heldout_kl=None, state={}))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    save(store, 1)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(start_and_cancel())
    assert names(folder) == ["step-1"]


def test_permission_denied(store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    save(store, 1)
    monkeypatch.setattr("tempfile.mkdtemp", denied)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(store, 2)
    assert names(folder) == ["step-1"]


def test_older_one_that_cannot_be_removed(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmtree(path: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(store, 1)
    save(store, 2)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    with pytest.raises(CheckpointError, match=r"step-3 is whole, but older .* could not be removed: .*step-1"):
        save(store, 3)
    assert store.newest_whole().step == 3


def test_folder_is_a_file(store: CheckpointStore, folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(CheckpointError, match="File exists"):
        save(store, 1)


def test_too_little_space_is_refused_before_writing(store: CheckpointStore, folder: Path) -> None:
    async def write(aside: Path) -> None:
        raise AssertionError("nothing should be written")

    save(store, 1)
    with pytest.raises(CheckpointError, match=r"needs 1073741824\.0 GiB but only .* are free"):
        save(store, 2, write, needed_bytes=2**60)
    assert names(folder) == ["step-1"]


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest cut", "manifest gone", "manifest odd", "state gone"])
def test_damaged_newest_is_passed_over(
    store: CheckpointStore, folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 2)
    save(store, 4)
    newest = folder / "step-4"
    match damage:
        case "cut":
            os.truncate(newest / "training" / "rank-0.safetensors", 1500)
        case "gone":
            (newest / "training" / "rank-0.safetensors").unlink()
        case "manifest cut":
            os.truncate(newest / "manifest.json", 50)
        case "manifest odd":
            (newest / "manifest.json").write_text("[]")
        case "state gone":
            (newest / "state.json").unlink()
        case _:
            (newest / "manifest.json").unlink()
    assert list(store.list().damaged) == ["step-4"]
    assert store.newest_whole().step == 2
    assert "passing over step-4, going on from step-2: " in caplog.text
    save(store, 4)  # written again by the resumed run
    assert store.newest_whole().step == 4


def test_changed_content_is_seen_by_hash(store: CheckpointStore, folder: Path) -> None:
    save(store, 2)
    save(store, 4)
    (folder / "step-4" / "model.safetensors").write_bytes(b"x" * 1000)
    assert store.list().damaged == {}
    assert "other content" in store.list(deep=True).damaged["step-4"][0]
    assert store.newest_whole().step == 2


def test_damaged_ones_do_not_count_as_kept(store: CheckpointStore, folder: Path) -> None:
    for step in (2, 4):
        save(store, step)
    (folder / "step-4" / "model.safetensors").unlink()
    save(store, 6)
    assert [c.step for c in store.list().whole] == [2, 6]


def test_only_damaged_ones_do_not_resume_from_nothing(store: CheckpointStore, folder: Path) -> None:
    save(store, 2)
    (folder / "step-2" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"only damaged ones: .*model\.safetensors is missing"):
        store.newest_whole()


def test_no_checkpoint_to_resume_from(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="none was written yet"):
        store.newest_whole()


def test_foreign_folder_is_no_checkpoint(store: CheckpointStore, folder: Path) -> None:
    save(store, 2)
    (folder / "step-final").mkdir()
    assert list(store.list().damaged) == ["step-final"]
    assert store.newest_whole().step == 2


def _die_while_writing(folder: Path) -> None:
    async def write(aside: Path) -> None:
        (aside / "model.safetensors").write_bytes(b"w" * 10)
        os.kill(os.getpid(), signal.SIGKILL)

    save(CheckpointStore(folder, keep_last=2), 4, write)


def test_killed_while_writing(store: CheckpointStore, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(store, 2)
    child = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(folder,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    (leftover,) = folder.glob(".tmp-step-4-*")
    again = CheckpointStore(folder, keep_last=2)
    assert f"removed {leftover}" in caplog.text
    assert names(folder) == ["step-2"]
    assert again.newest_whole().step == 2


def _die_while_replacing(folder: Path) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.startswith(".tmp-"):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, target)

    Path.rename = rename  # type: ignore[method-assign]
    save(CheckpointStore(folder, keep_last=2), 2)


def test_killed_between_the_two_renames_of_a_replacement(store: CheckpointStore, folder: Path) -> None:
    save(store, 2, kl=0.25)
    child = multiprocessing.get_context("fork").Process(target=_die_while_replacing, args=(folder,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert not (folder / "step-2").exists()
    assert CheckpointStore(folder, keep_last=2).newest_whole().heldout_kl == 0.25
    assert names(folder) == ["best", "step-2"]


def test_pruning_comes_after_the_new_one_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = CheckpointStore(folder, keep_last=1)
    save(store, 1)
    events = []
    real_seal, real_rmtree = durable.seal, shutil.rmtree

    def seal(*args: object) -> None:
        events.append("sealed")
        real_seal(*args)  # type: ignore[arg-type]

    def rmtree(path: Path, *, ignore_errors: bool = False) -> None:
        if path.exists():
            events.append(f"removed {path.name}")
        real_rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(durable, "seal", seal)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", rmtree)
    save(store, 2)
    assert events == ["sealed", "removed step-1"]


def test_keep_last_must_keep_something(folder: Path) -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointStore(folder, keep_last=0)
