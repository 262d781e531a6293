"""Folders that are whole or not there: written aside, listed in a manifest, flushed to disk, renamed into place.

    .tmp-NAME-PID-xxxx/  ──files──►  seal() writes manifest.json last  ──►  put_in_place() renames it to NAME/

A reader trusts a folder only after `find_faults()` compared it with its manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

MANIFEST = "manifest.json"
_TEMP = ".tmp-"
_REPLACED = ".old-"


def make_folder_aside(parent: Path, name: str) -> Path:
    """Give a new empty folder beside `parent/name`, to be filled and put in place."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_TEMP}{name}-{os.getpid()}-", dir=parent))
    folder.chmod(0o755)  # mkdtemp makes it private; the finished folder is not
    return folder


def seal(folder: Path, info: Mapping[str, Any], *, hash_up_to_bytes: int | None = None) -> None:
    """Write the manifest of a filled folder and flush everything to disk.

    Args:
        folder: what `make_folder_aside` gave.
        info: what else the manifest should say (JSON types).
        hash_up_to_bytes: larger files are recorded by size alone; None: every file is hashed.
    """
    files = {}
    for path in _files_of(folder):
        size = path.stat().st_size
        hashed = hash_up_to_bytes is None or size <= hash_up_to_bytes
        files[str(path.relative_to(folder))] = {"bytes": size, "sha256": _sha256(path) if hashed else None}
        _fsync(path)
    write_text_durably(folder / MANIFEST, json.dumps({**info, "files": files}, indent=1))
    for inner in [p for p in folder.rglob("*") if p.is_dir()]:
        _fsync(inner)
    _fsync(folder)


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a sealed folder to `target`, in the stead of what is there."""
    replaced = aside.with_name(_REPLACED + aside.name.removeprefix(_TEMP))
    if target.exists():
        # Two renames: a crash between them is undone by remove_leftovers, which finds the old folder.
        target.rename(replaced)
    aside.rename(target)
    _fsync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_leftovers(parent: Path, name_prefix: str = "") -> list[str]:
    """Remove what dead processes left half-made, and give its names; a replaced folder without successor returns."""
    removed = []
    for folder in sorted(parent.glob(f"{_REPLACED}{name_prefix}*")):
        target = parent / folder.name.removeprefix(_REPLACED).rsplit("-", 2)[0]
        if not target.exists():
            folder.rename(target)
            continue
        shutil.rmtree(folder)
        removed.append(folder.name)
    for folder in sorted(parent.glob(f"{_TEMP}{name_prefix}*")):
        pid = folder.name.rsplit("-", 2)[1]
        if pid.isdigit() and int(pid) != os.getpid() and psutil.pid_exists(int(pid)):
            continue
        shutil.rmtree(folder)
        removed.append(folder.name)
    return removed


def read_manifest(folder: Path) -> dict[str, Any]:
    """Give the manifest of a folder.

    Raises:
        ValueError: there is none, or it is not readable as one.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: no {MANIFEST}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{folder}: {MANIFEST} is damaged ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{folder}: {MANIFEST} is damaged (it lists no files)")
    return manifest


def find_faults(folder: Path, *, deep: bool = False) -> list[str]:
    """Give what is wrong with a folder, by its manifest; nothing when it is whole.

    Args:
        folder: a folder that was sealed.
        deep: also compare the recorded hashes (reads every file).
    """
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return [str(error)]
    faults = []
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != record["bytes"]:
            faults.append(f"{path} has {path.stat().st_size} bytes instead of {record['bytes']}")
        elif deep and record["sha256"] is not None and _sha256(path) != record["sha256"]:
            faults.append(f"{path} has other content than when it was written")
    return faults


def write_text_durably(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new text, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
