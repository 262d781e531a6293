"""Messages and answers to token ids: the one way in, for student, teacher and evaluation alike.

Three rules hold wherever text becomes ids:

- A rendered chat is encoded without the tokenizer's own special tokens, since the template writes them. Only the prompt
  of a model without a chat template gets them.
- Text of a message never becomes a control token. Where it spells one, as in "what does <|im_end|> mean?", the
  spelling is cut into plain tokens (`data.control_text="split"`) or the row is refused. Control tokens are those that
  the tokenizer declares special; added tokens that are not (`<think>`, `<tool_call>`) are content and stay whole.
- An answer's ids are those of its text and one end token: what the student would sample after the prompt's ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError
from numpy.typing import NDArray

from opd.config import DataConfig
from opd.data.messages import Message, all_texts, clean_messages, content_text, map_texts, merge_system
from opd.data.refusals import RowRefusedError

if TYPE_CHECKING:  # transformers takes seconds to import, and the caller brings the tokenizer
    from transformers import PreTrainedTokenizerBase

RESERVED_OPTIONS = frozenset(
    ("conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "chat_template")
)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end an answer."""

    turn_end: int
    """What the chat template writes after an answer; every whole answer of a data set ends in it."""
    all: frozenset[int]
    """All that end generation: `turn_end`, the tokenizer's and those of `generation_config.json`."""


class ChatRenderer:
    """Turns messages into prompt ids and answers into response ids, always with the same options."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, model_folder: Path | None = None
    ) -> None:
        """Check the template, its options and the end tokens; `model_folder` may hold `generation_config.json`.

        Raises:
            ValueError: the options do not fit the template, or the model has no end token.
        """
        self._tokenizer = tokenizer
        self._config = config
        self.has_template: bool = tokenizer.chat_template is not None
        _check_options(tokenizer, config)
        self.end_tokens = _find_end_tokens(tokenizer, config.chat_template_options, model_folder)
        added = tokenizer.added_tokens_decoder
        self._control = {
            token.content: i for i, token in added.items() if token.special or i == self.end_tokens.turn_end
        }
        self._unknown_ids = frozenset(i for i in (tokenizer.unk_token_id,) if isinstance(i, int))
        self._control_ids = frozenset(self._control.values())
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        spellings = sorted(self._control, key=len, reverse=True)  # the longest wins, as in the tokenizer
        # `(?!)` matches nothing: a tokenizer may have no control token at all.
        self._control_pattern = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._end_spellings = tuple(s for s, i in self._control.items() if i in self.end_tokens.all)
        self._prompt_prefix = _plain_prompt_prefix(tokenizer)

    def question_ids(self, text: object) -> NDArray[np.int32]:
        """Give the prompt ids [P] of one question: a user turn, or plain text for a model without a chat template.

        Raises:
            RowRefusedError: the question is no text, is empty, or cannot be rendered.
        """
        question = content_text(text)
        if not question.strip():
            raise RowRefusedError("empty prompt")
        if self.has_template:
            return self.prompt_ids([{"role": "user", "content": question}])
        self._refuse_control([question])
        return np.asarray(self._prompt_prefix + self._encode_plain(question), dtype=np.int32)

    def prompt_ids(self, messages: object) -> NDArray[np.int32]:
        """Give the prompt ids [P] of a chat, up to where the assistant's next answer begins.

        Raises:
            RowRefusedError: the messages are malformed, or the template cannot render them.
        """
        cleaned = clean_messages(messages)
        if self._config.system_prompt is not None and all(m["role"] != "system" for m in cleaned):
            cleaned = [{"role": "system", "content": self._config.system_prompt}, *cleaned]
        if self._config.system_role == "merge":
            cleaned = merge_system(cleaned)
        spells_control = self._refuse_control(texts := list(all_texts(cleaned)))
        ids = self._split_ids(cleaned, texts) if spells_control else self._encode(self._render(cleaned))
        return np.asarray(ids, dtype=np.int32)

    def answer_ids(self, text: str) -> NDArray[np.int32]:
        """Give the response ids [R] of an answer, end token included.

        An answer that already ends in the spelling of an end token, as some data sets have it, gets no second one.

        Raises:
            RowRefusedError: the text spells a control token and may not, or cannot be split.
        """
        spelled_end = next((s for s in self._end_spellings if text.endswith(s)), "")
        body = text.removesuffix(spelled_end)
        self._refuse_control([body])
        return np.asarray([*self._encode_plain(body), self.end_tokens.turn_end], dtype=np.int32)

    def _refuse_control(self, texts: Sequence[str]) -> bool:
        """Give whether a text spells a control token; refuse it when the policy says so."""
        found = next((match for text in texts if (match := self._control_pattern.search(text))), None)
        if found and self._config.control_text == "refuse":
            raise RowRefusedError("text spells a control token", found.group())
        return found is not None

    def _render(self, messages: list[Message]) -> str:
        try:
            return _render(self._tokenizer, messages, self._config.chat_template_options)
        except TemplateError as error:
            if any(m["role"] == "system" for m in messages) and self._renders(merge_system(messages)):
                raise RowRefusedError(
                    "the chat template takes no system message",
                    f'it says: {error}; set data.system_role="merge" to put the text into the first user turn',
                ) from error
            raise RowRefusedError("the chat template cannot render the messages", str(error)) from error

    def _renders(self, messages: list[Message]) -> bool:
        try:
            _render(self._tokenizer, messages, self._config.chat_template_options)
        except TemplateError:
            return False
        return True

    def _encode(self, text: str) -> list[int]:
        """Encode a text in which control tokens count as such."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _encode_plain(self, text: str) -> list[int]:
        """Encode a text of which no part becomes a control token."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        found = self._control_ids.intersection(ids)
        if str(self._tokenizer.unk_token) not in text:
            found = found - self._unknown_ids  # then it stands for a sign that is not in the vocabulary
        if found:
            raise RowRefusedError("text spells a control token", "this tokenizer cannot split it into plain tokens")
        return ids

    def _split_ids(self, messages: list[Message], texts: Sequence[str]) -> list[int]:
        """Encode a chat whose texts spell control tokens, those spellings as plain tokens.

        The spellings are hidden behind marks while the template runs, so that every control token in the rendered chat
        is the template's own. The text between two of those is encoded as a whole, as the tokenizer does it too.
        """
        everything = "".join(texts)
        # Letters and digits only: a template may write a field by `tojson` or as Python prints it.
        mark = next(mark for mark in map("hidden{}x".format, count()) if mark not in everything)
        spellings: list[str] = []

        def hide(match: re.Match[str]) -> str:
            spellings.append(match.group())
            return f"{mark}{len(spellings) - 1}x"

        hidden = [
            {
                name: map_texts(value, lambda text: self._control_pattern.sub(hide, text))
                for name, value in message.items()
            }
            for message in messages
        ]
        rendered = self._render(hidden)
        if self._between_control(rendered, lambda text: text) != self._encode(rendered):
            # For example a tokenizer that puts a space before the first text only.
            raise RowRefusedError("text spells a control token", "this tokenizer does not encode a chat piece by piece")
        shown = re.compile(f"{mark}(\\d+)x")
        return self._between_control(rendered, lambda text: shown.sub(lambda m: spellings[int(m.group(1))], text))

    def _between_control(self, rendered: str, change: Callable[[str], str]) -> list[int]:
        """Encode the control tokens of `rendered` as such, and the texts between them, changed, as plain text."""
        ids: list[int] = []
        start, strip_left = 0, False
        for match in self._control_pattern.finditer(rendered):
            strip_right, next_strip_left = self._strips[match.group()]
            ids += self._encode_piece(change(rendered[start : match.start()]), strip_left, strip_right)
            ids.append(self._control[match.group()])
            start, strip_left = match.end(), next_strip_left
        return ids + self._encode_piece(change(rendered[start:]), strip_left, False)

    def _encode_piece(self, text: str, strip_left: bool, strip_right: bool) -> list[int]:
        text = text.lstrip() if strip_left else text
        return self._encode_plain(text.rstrip() if strip_right else text)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], options: Mapping[str, Any], *, to_answer: bool = True
) -> str:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer, **options)
    assert isinstance(rendered, str)
    return rendered


def _check_options(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    if tokenizer.chat_template is None:
        for field in ("messages_column", "system_prompt", "chat_template_options"):
            if value := config.model_dump()[field]:
                raise ValueError(
                    f"data.{field} is {value!r}, but the model's tokenizer has no chat template; use a chat model, or "
                    "unset it and give prompts as plain text with data.prompt_column and data.response_column"
                )
        return
    template = tokenizer.get_chat_template()
    for name in config.chat_template_options:
        if name in RESERVED_OPTIONS:
            raise ValueError(f"data.chat_template_options holds {name!r}, which is not the template's; take it out")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(
                f"data.chat_template_options holds {name!r}, which the model's chat template does not use; "
                "take it out or correct its name"
            )


def _find_end_tokens(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], model_folder: Path | None
) -> EndTokens:
    declared = _declared_end_ids(model_folder)
    eos = tokenizer.eos_token_id
    if isinstance(eos, int):
        declared.insert(0, eos)
    turn_end = _template_end_id(tokenizer, options) if tokenizer.chat_template is not None else None
    if turn_end is None:
        if not declared:
            raise ValueError("the tokenizer has no eos_token and nothing else names an end token; set its eos_token")
        turn_end = declared[0]
    return EndTokens(turn_end, frozenset((turn_end, *declared)))


def _template_end_id(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> int | None:
    """Give the first added token that the template writes after an answer, None when it writes none."""
    answer = "ANSWER"
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": answer}]
    try:
        rendered = _render(tokenizer, chat, options, to_answer=False)
    except TemplateError as error:
        raise ValueError(
            f"the model's chat template cannot render a user turn and an answer: {error}; "
            "check the tokenizer's chat_template and data.chat_template_options"
        ) from error
    _, found, after = rendered.rpartition(answer)
    ids: list[int] = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
    added = tokenizer.added_tokens_decoder
    # Some tokenizers add runs of spaces and line ends as tokens; those end nothing.
    return next((i for i in ids if i in added and added[i].content.strip()), None)


def _declared_end_ids(model_folder: Path | None) -> list[int]:
    """Give the end ids of `generation_config.json`, which names none, one or a list."""
    file = model_folder / "generation_config.json" if model_folder else None
    if file is None or not file.is_file():
        return []
    value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id in {file} is {value!r}; it must be a token id or a list of them")
    return ids


def _plain_prompt_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Give what the tokenizer puts before plain text (a BOS); what it puts behind would end the prompt."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:start]
