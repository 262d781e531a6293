"""All settings as a user sees them, from the config's JSON schema; and what is wrong with a config, key by key."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from opd.config import RunConfig

_LONGEST_VALUE_SHOWN = 80


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One setting, as a user sees it."""

    key: str
    """As `--set` takes it: `learner.lr`."""
    type: str
    """What is allowed: `number > 0`."""
    default: str
    """`required` when there is none."""
    help: str


@dataclass(frozen=True, slots=True)
class _Section:
    """One config class of the tree."""

    title: str
    prefix: str
    help: str
    keys: tuple[KeyInfo, ...]


def list_keys() -> list[KeyInfo]:
    """Give every setting, section by section."""
    return [key for section in _sections() for key in section.keys]


def keys_table(width: int | None = None) -> str:
    """Give all settings as aligned text: key, default, and help with what is allowed; `width` is the terminal's."""
    width = width or max(80, shutil.get_terminal_size((100, 24)).columns)
    key_width = max(len(k.key) for k in list_keys()) + 2
    default_width = 15
    hanging = " " * (key_width + default_width)
    lines: list[str] = []
    for section in _sections():
        lines += ["", section.help]
        for key in section.keys:
            start = f"{key.key:<{key_width}}{key.default:<{default_width - 1}} "
            text = f"{key.help} [{key.type}]".strip()
            lines += textwrap.wrap(text, width, initial_indent=start, subsequent_indent=hanging, break_on_hyphens=False)
    return "\n".join(lines[1:])


def keys_markdown() -> str:
    """Give `docs/config.md`."""
    lines = [
        "# Settings",
        "",
        "Every key of a run's config. A recipe sets them in Python; `--set KEY=VALUE` changes one for a run, and",
        "`python -m opd.run --list-keys` prints this list. `teacher.` is short for `teachers.0.` where there is one",
        "teacher. This page is generated: `python -m tools.write_config_doc`.",
    ]
    for section in _sections():
        name = f"`{section.prefix.removesuffix('.')}`" if section.prefix else "The run"
        lines += ["", f"## {name}", "", section.help, "", "| key | allowed | default | |", "|---|---|---|---|"]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{k.key}`", k.type, k.default, k.help)) + " |"
            for k in section.keys
        ]
    return "\n".join(lines) + "\n"


def _sections() -> list[_Section]:
    schema = RunConfig.model_json_schema()
    return list(_walk(schema, schema["$defs"], "", {}))


def _walk(
    section: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str, defaults: Mapping[str, Any]
) -> Iterator[_Section]:
    """Give this section, then those within it; `defaults` are the enclosing section's own, if it has any."""
    keys: list[KeyInfo] = []
    inner: list[Iterator[_Section]] = []
    for name, node in section["properties"].items():
        node = {**node, "default": defaults[name]} if name in defaults else node
        branches = node.get("anyOf", [node])
        is_list = "items" in node
        refs = [b["$ref"] for b in ([node["items"]] if is_list else branches) if "$ref" in b]
        for ref in refs:
            key = f"{prefix}{name}." + ("0." if is_list else "")
            inner.append(_walk(definitions[ref.rpartition("/")[2]], definitions, key, node.get("default") or {}))
        if not refs:
            default = _text_of(node["default"]) if "default" in node else "required"
            keys.append(KeyInfo(prefix + name, _type_of(node), default, node.get("description", "")))
    yield _Section(section["title"], prefix, section.get("description", ""), tuple(keys))
    for sections in inner:
        yield from sections


def _type_of(node: Mapping[str, Any]) -> str:
    """Give what a JSON schema allows, in words."""
    if "anyOf" in node:
        return " | ".join(map(_type_of, node["anyOf"]))
    if "enum" in node or "const" in node:
        return " | ".join(node.get("enum") or [node["const"]])
    bounds = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = " and ".join(f"{sign} {node[name]:g}" for name, sign in bounds.items() if name in node)
    match node.get("type"):
        case "boolean":
            return "true | false"
        case "integer" | "number" as kind:
            return f"{kind} {limits}".strip()
        case "string":
            pattern = f" matching {node['pattern']}" if "pattern" in node else ""
            return ("path" if node.get("format") == "path" else "text") + pattern
        case "object":
            return "JSON object"
        case "array":
            return f"list of {_type_of(node['items'])}"
        case "null":
            return "none"
        case other:
            raise AssertionError(f"list_keys does not know the schema type {other!r}: {node}")


def _text_of(default: object) -> str:
    if default is None or isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def explain(error: ValidationError) -> str:
    """Give one line for each wrong setting: its key, its value and what is allowed."""
    prefix = _prefixes().get(error.title, "")
    return "\n".join(
        _explain_one(prefix + ".".join(map(str, e["loc"])), e["type"], e["msg"], e["input"], e.get("ctx", {}))
        for e in error.errors(include_url=False)
    )


def _explain_one(key: str, kind: str, message: str, value: object, context: Mapping[str, Any]) -> str:
    key = key.removesuffix(".")
    what = allowed().get(_with_index_0(key))
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind == "extra_forbidden":
        return f"{key}: there is no such setting{nearest(key)}"
    if kind == "missing":
        return f"{key} is missing" + (f"; allowed: {what}" if what else "; it is required")
    return f"{key} is {shown(value)}; " + (f"allowed: {what}" if what else message)


def nearest(key: str) -> str:
    """Give a hint: the known keys that are spelled most alike, as a whole or in their last part."""
    asked = re.sub(r"^teacher\.", "teachers.0.", key)
    known = list(allowed())
    lasts = difflib.get_close_matches(_last(asked), {_last(k) for k in known}, n=2, cutoff=0.7)
    found = {k for k in known if _last(k) in lasts} | set(difflib.get_close_matches(asked, known, n=2, cutoff=0.8))
    alike = sorted(found, key=lambda k: difflib.SequenceMatcher(None, asked, k).ratio(), reverse=True)
    return f"; did you mean {' or '.join(alike[:3])}?" if alike else "; --list-keys shows all"


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def shown(value: object) -> str:
    """Give a value as Python writes it, cut when long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE_SHOWN else text[: _LONGEST_VALUE_SHOWN - 3] + "..."


def allowed() -> dict[str, str]:
    """Give key → what is allowed there."""
    return {info.key: info.type for info in list_keys()}


def _with_index_0(key: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".0", key)


def _prefixes() -> dict[str, str]:
    """Give the name of each section's class → what its keys begin with."""
    return {section.title: section.prefix for section in _sections()}
