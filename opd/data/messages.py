"""Chat messages as data sets have them, checked and brought to one form: a role and one text each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opd.data.refusals import RowRefusedError

ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, Any]
"""`role`, `content` (text), and what else a template may use, as `tool_calls`."""


def clean_messages(messages: object) -> list[Message]:
    """Give chat messages with every content as one text and without null fields, which Parquet adds.

    Raises:
        RowRefusedError: a message is malformed; the detail names which.
    """
    if not isinstance(messages, list) or not messages:
        raise RowRefusedError("malformed messages", f"a non-empty list is needed, not {type(messages).__name__}")
    cleaned: list[Message] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise RowRefusedError("malformed messages", f"message {number} is {type(message).__name__}, not an object")
        role = message.get("role")
        if role not in ROLES:
            raise RowRefusedError("unknown role", f"message {number} has role {role!r}; known are {', '.join(ROLES)}")
        fields = {name: _without_nulls(value) for name, value in message.items() if value is not None}
        content = fields.get("content")
        if content is None and role == "assistant" and fields.get("tool_calls"):
            content = ""
        try:
            text = content_text(content)
        except RowRefusedError as error:
            raise RowRefusedError(error.reason, f"message {number}, {role}: {error.detail}") from error
        cleaned.append({**fields, "content": text})
    return cleaned


def content_text(content: object) -> str:
    """Give a message's content as text: a string, a number, or a list of text parts, which are joined.

    Raises:
        RowRefusedError: the content is null, of another type, or has a part that is no text.
    """
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
        others = [str(kind) for kind in kinds if kind != "text"]
        if others:
            raise RowRefusedError("content is not text", f"a part of type {others[0]}; only text parts can be used")
        return "".join(content_text(part.get("text")) for part in content)
    if isinstance(content, int | float) and not isinstance(content, bool):
        return str(content)
    if not isinstance(content, str):
        raise RowRefusedError("content is not text", "null" if content is None else type(content).__name__)
    if not content.isascii() and any("\ud800" <= c <= "\udfff" for c in content):
        raise RowRefusedError("content is not text", "it holds half a character (a lone surrogate)")
    return content


def merge_system(messages: list[Message]) -> list[Message]:
    """Give the messages without system turns, their text put before the first user turn's."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    others = [m for m in messages if m["role"] != "system"]
    first = next((i for i, m in enumerate(others) if m["role"] == "user"), None)
    if not system or first is None:
        return messages
    merged = {**others[first], "content": "\n\n".join([*system, others[first]["content"]])}
    return [*others[:first], merged, *others[first + 1 :]]


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def map_texts(value: object, change: Callable[[str], str]) -> object:
    """Give `value` with every text changed, at any depth, keys included: a tool call's arguments hold them too."""
    if isinstance(value, dict):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def all_texts(value: object) -> list[str]:
    """Give every text at any depth."""
    found: list[str] = []
    map_texts(value, lambda text: found.append(text) or text)
    return found
