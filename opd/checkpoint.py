"""Checkpoints: each is whole or not there, and the newest and the best are kept.

    checkpoints/step-10/        HF files, what the learner needs to go on, state.json, manifest.json (sizes, sha256)
                step-15/
                best -> step-10 the lowest held-out forward KL
                .tmp-step-20-*  being written; removed after a crash

One process writes into a folder at a time; `opd.run` sees to that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import opd
from opd import durable
from opd.errors import CheckpointError

logger = logging.getLogger(__name__)

_STATE = "state.json"
_BEST = "best"
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are all there."""

    step: int
    """Optimiser steps done."""
    folder: Path
    heldout_kl: float | None
    """Nats per token; None: it was not measured at this step."""
    saved_at: str
    """UTC, ISO 8601."""
    state: Mapping[str, Any]
    """What `save` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a folder of checkpoints holds."""

    whole: list[Checkpoint]
    """By step, the newest last."""
    damaged: dict[str, list[str]]
    """Folder name → what is wrong with it; the newest last."""


class CheckpointStore:
    """Keeps the checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int, *, run_name: str = "") -> None:
        """Remove what an earlier crash left half-written.

        Args:
            folder: the run's `checkpoints` folder; made at the first save.
            keep_last: newest checkpoints kept, besides the best by held-out KL.
            run_name: written into manifests.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least one checkpoint must be kept")
        self._folder, self._keep_last, self._run_name = folder, keep_last, run_name
        for name in durable.remove_leftovers(folder):
            logger.warning("removed %s, which an interrupted run had left half-written", folder / name)

    async def save(
        self,
        step: int,
        write: Callable[[Path], Awaitable[None]],
        *,
        heldout_kl: float | None,
        state: Mapping[str, Any],
        needed_bytes: int = 0,
    ) -> Path:
        """Write a checkpoint, give its folder, then remove those that are no longer to be kept.

        A checkpoint of the same step is replaced, once the new one is whole.

        Args:
            step: optimiser steps done.
            write: writes the files into the folder that it is given.
            heldout_kl: nats per token; None, or not finite: never the best.
            state: what else a resumed run needs (JSON types).
            needed_bytes: refuse to begin with less free space.

        Raises:
            CheckpointError: the disk is full or cannot be written; no whole checkpoint was lost.
        """
        started = time.monotonic()
        target = self._folder / f"step-{step}"
        try:
            await self._write_aside(target, step, write, heldout_kl, state, needed_bytes)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {target} could not be written: {error.strerror or error}; older checkpoints are as they "
                "were. Free some space or mend the folder"
            ) from error
        try:
            await asyncio.to_thread(self._keep_newest_and_best)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {target} is whole, but older ones could not be removed: {error}; mend the folder"
            ) from error
        logger.debug("checkpoint %s took %.1f s", target, time.monotonic() - started)
        return target

    def list(self, *, deep: bool = False) -> Listing:
        """Give the whole checkpoints, and what is wrong with the others.

        Args:
            deep: also compare the content of every file with its hash.
        """
        whole, damaged = [], {}
        for folder in sorted(self._folder.glob("step-*"), key=_step_in_name):
            faults = durable.find_faults(folder, deep=deep)
            if faults:
                damaged[folder.name] = faults
            else:
                whole.append(_read(folder))
        return Listing(whole=whole, damaged=damaged)

    def newest_whole(self, *, deep: bool = True) -> Checkpoint:
        """Give the newest whole checkpoint; damaged newer ones are named in the log.

        Raises:
            ValueError: there is none, so that a run never starts again from nothing unasked.
        """
        listing = self.list(deep=deep)
        if not listing.whole:
            faults = "; ".join(fault for faults in listing.damaged.values() for fault in faults)
            found = f"only damaged ones: {faults}" if listing.damaged else "none was written yet"
            raise ValueError(f"no checkpoint to go on from in {self._folder}, {found}")
        newest = listing.whole[-1]
        for name, faults in listing.damaged.items():
            if _step_in_name(Path(name)) > newest.step:
                logger.warning("passing over %s, going on from step-%d: %s", name, newest.step, "; ".join(faults))
        return newest

    def best(self) -> Checkpoint | None:
        """Give the whole checkpoint with the lowest held-out KL, the newest of equals; None when none was measured."""
        return _best(self.list().whole)

    async def _write_aside(
        self,
        target: Path,
        step: int,
        write: Callable[[Path], Awaitable[None]],
        heldout_kl: float | None,
        state: Mapping[str, Any],
        needed_bytes: int,
    ) -> None:
        aside = durable.make_folder_aside(self._folder, target.name)
        try:
            free_bytes = shutil.disk_usage(aside).free
            if free_bytes < needed_bytes:
                raise CheckpointError(
                    f"checkpoint {target} needs {needed_bytes / _GIB:.1f} GiB but only {free_bytes / _GIB:.1f} GiB are "
                    "free; older checkpoints are as they were. Free some space"
                )
            await write(aside)
            (aside / _STATE).write_text(json.dumps(dict(state), indent=1))
            info = {
                "step": step,
                "heldout_kl": heldout_kl if heldout_kl is not None and math.isfinite(heldout_kl) else None,
                "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "opd_version": opd.__version__,
                "run": self._run_name,
            }
            await asyncio.to_thread(durable.seal, aside, info)
            durable.put_in_place(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _keep_newest_and_best(self) -> None:
        whole = self.list().whole
        best = _best(whole)
        if best is not None:
            link = self._folder / f".{_BEST}.{os.getpid()}.new"
            link.unlink(missing_ok=True)
            link.symlink_to(best.folder.name)
            link.replace(self._folder / _BEST)
        for checkpoint in whole[: -self._keep_last]:
            if best is None or checkpoint.step != best.step:
                shutil.rmtree(checkpoint.folder)


def _read(folder: Path) -> Checkpoint:
    manifest = durable.read_manifest(folder)
    return Checkpoint(
        step=manifest["step"],
        folder=folder,
        heldout_kl=manifest["heldout_kl"],
        saved_at=manifest["saved_at"],
        state=json.loads((folder / _STATE).read_text()),
    )


def _best(whole: list[Checkpoint]) -> Checkpoint | None:
    measured = [(c.heldout_kl, -c.step, c) for c in whole if c.heldout_kl is not None]
    return min(measured)[2] if measured else None


def _step_in_name(folder: Path) -> int:
    """Give 10 for `step-10`; -1 for a name that this module did not give, which then counts as damaged and oldest."""
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1
