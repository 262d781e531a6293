"""Recipes and settings: a recipe file to a `RunConfig`, `--set key=value` on top, and the list of all keys.

    recipe(host) ──► RunConfig ──► override("learner.lr=1e-5") ──► RunConfig ──► config_json() ──► runs/NAME/config.json

Whatever a user gets wrong here becomes a `ValueError` that names the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from opd.config import Config, RunConfig
from opd.device import HostProfile
from opd.settings import KeyInfo, allowed, explain, keys_markdown, keys_table, list_keys, nearest, shown

__all__ = ["KeyInfo", "config_json", "keys_markdown", "keys_table", "list_keys", "load_recipe", "override"]


def load_recipe(path: Path, host: HostProfile) -> RunConfig:
    """Import a recipe file and give what its `recipe(host)` returns.

    Raises:
        ValueError: there is no such file, or it is no recipe, or it fails; names the recipe's own line where it does.
    """
    _check_recipe_path(path)
    with _blaming(path):
        module = _import_file(path)
    function = vars(module).get("recipe")
    if not callable(function):
        raise ValueError(f"{path} has no function recipe(host); define one that returns an opd.config.RunConfig")
    with _blaming(path):
        config = function(host)
    if not isinstance(config, RunConfig):
        raise ValueError(f"{path}: recipe(host) returns {shown(config)}; it must return an opd.config.RunConfig")
    return config


def _check_recipe_path(path: Path) -> None:
    if path.is_file() and path.suffix == ".py":
        return
    folder = path if path.is_dir() else path.parent
    there = sorted(p for p in folder.glob("*.py") if p.stem != "__init__")
    if not there:
        there = sorted(p for p in Path("recipes").glob("*.py") if p.stem != "__init__")
    kind = "is a folder" if path.is_dir() else "is no Python file (.py)"
    problem = kind if path.exists() else "does not exist"
    near = difflib.get_close_matches(path.stem, [p.stem for p in there], n=1)
    hint = "".join(f"; did you mean {p}?" for p in there if p.stem in near)
    listing = f" Recipes there: {', '.join(map(str, there))}" if there else " Name a recipe file."
    raise ValueError(f"recipe {path} {problem}{hint or '.'}{listing}")


def _import_file(path: Path) -> ModuleType:
    name = f"opd_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    # A recipe may import a sibling that it is a variant of; last in the path, so that it hides no package.
    sys.path.append(str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop()
    return module


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Turn what the user's code raises into a message with the recipe's own file and line."""
    try:
        yield
    except ValidationError as error:
        lines = textwrap.indent(explain(error), "  ")
        raise ValueError(f"{_place(path, error)}: these settings are not allowed:\n{lines}") from error
    except SyntaxError as error:
        raise ValueError(f"{error.filename or path}:{error.lineno}: SyntaxError: {error.msg}") from error
    except Exception as error:  # the recipe is the user's code: anything may come out of it
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{_place(path, error)}: {kind}{error}") from error


def _place(path: Path, error: Exception) -> str:
    """Give `file:line` of the recipe's innermost line in the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
    return f"{path}:{lines[-1]}" if lines else str(path)


def override(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """Give the config with `key=value` assignments applied, all checks run again; the last of a key wins.

    Args:
        config: what the recipe returned; stays as it is.
        assignments: as `learner.lr=1e-5`, `teacher.dtype=fp32` (the only teacher), `data.task_options={"n": 3}`.

    Raises:
        ValueError: no `=`, an unknown key, or a value that is not allowed.
    """
    tree = config.model_dump()
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"--set {assignment!r} is no assignment; write it as --set learner.lr=1e-5")
        path, field = _locate(config, key)
        node: Any = tree
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = _convert(".".join(map(str, path)), text.strip(), field)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ValueError(explain(error)) from error


def _locate(config: RunConfig, key: str) -> tuple[list[str | int], FieldInfo]:
    """Give the place of a key in the config's tree, and its field."""
    parts = key.split(".")
    if parts[0] == "teacher" and len(config.teachers) == 1:
        parts[:1] = ["teachers", "0"]
    path: list[str | int] = []
    field = FieldInfo()
    value: Any = config
    for part in parts:
        so_far = ".".join(map(str, path))
        if isinstance(value, Config) and part in type(value).model_fields:
            path.append(part)
            field, value = type(value).model_fields[part], dict(value)[part]
        elif isinstance(value, list):
            if not part.isdecimal() or int(part) >= len(value):
                raise ValueError(f"--set {key}: {so_far} has the entries 0 to {len(value) - 1}, not {part!r}")
            path.append(int(part))
            value = value[int(part)]
        elif isinstance(value, dict):
            raise ValueError(f"--set {key}: {so_far} is set as a whole, as {so_far}='{{\"{part}\": 1}}'")
        elif value is None and _may_be_section(field):
            raise ValueError(f"--set {key}: {so_far} is none in this recipe; choose a recipe that has it")
        else:
            raise ValueError(f"--set {key}: there is no such setting{nearest(key)}")
    if isinstance(value, Config | list):
        example = next(known for known in allowed() if known.startswith(f"{path[0]}."))
        raise ValueError(f"--set {key}: this is a section; set its keys one by one, as {example}=...")
    return path, field


def _may_be_section(field: FieldInfo) -> bool:
    return any(isinstance(a, type) and issubclass(a, Config) for a in get_args(field.annotation))


def _convert(key: str, text: str, field: FieldInfo) -> object:
    """Give the value that a text stands for, by the type of its field; its range is checked with the whole config."""
    assert field.annotation is not None, key
    nullable = field.annotation is NoneType or NoneType in get_args(field.annotation)
    if nullable and text.lower() in ("none", "null"):
        return None
    if _may_be_section(field):
        raise ValueError(f"--set {key}={text}: this is a section, none in this recipe; choose a recipe that has it")
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation)
    try:
        is_dict = get_origin(field.annotation) is dict
        return adapter.validate_json(text) if is_dict else adapter.validate_strings(text)
    except ValidationError as error:
        raise ValueError(f"{key} is {text!r}; allowed: {allowed()[re.sub(r'[.][0-9]+[.]', '.0.', key)]}") from error


def config_json(config: RunConfig) -> str:
    """Give the resolved config, which `RunConfig.model_validate_json` reads back to an equal one."""
    return config.model_dump_json(indent=2) + "\n"
