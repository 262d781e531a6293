"""Data rows to samples to train on and samples to evaluate on, and the order in which they are trained on.

    rows ──► ChatRenderer ──► Sample ──► train ──► DatasetSource ──► loop
                   │             └─────► heldout
                   └► refused: named, counted, and too many of them stop the run

Everything here happens before a model is loaded, so that a row which cannot be used is known at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opd.config import DataConfig
from opd.data.chat import ChatRenderer, EndTokens
from opd.data.messages import content_text
from opd.data.refusals import (
    HELDOUT_TWIN,
    RefusalReport,
    RefusedRow,
    RowRefusedError,
    TooManyRefusedError,
    first_few,
)
from opd.data.rows import Row, check_column, lookup, read_rows
from opd.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_TEXT_FIELDS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Parts of an assistant message that only a chat template can turn into text, each in its own way."""

GSM8K_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """A run's data, ready to be trained on."""

    train: list[Prompt | Sample]
    """In file order; prompts where the rows have no answer."""
    heldout: list[Prompt | Sample]
    """For evaluation; no sample of `train` has the prompt of one of these."""
    refused: RefusalReport
    renderer: ChatRenderer
    """What the prompts were rendered with, for whoever renders more."""

    @property
    def end_tokens(self) -> EndTokens:
        """What ends an answer."""
        return self.renderer.end_tokens


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    teacher: str,
    seed: int,
    model_folder: Path | None = None,
    window: int | None = None,
) -> PreparedData:
    """Give the samples of a run and the rows that were refused.

    Args:
        config: where the rows are and what to make of them.
        tokenizer: the student's.
        teacher: name of the teacher that scores the samples.
        seed: chooses the held-out rows and makes reasoning_gym rows.
        model_folder: may hold `generation_config.json`, which names more end tokens.
        window: tokens that a prompt and its response may have together, by the models' context lengths.

    Raises:
        ValueError: the source, a column or an option is wrong, or no row is left.
        TooManyRefusedError: more rows were refused than `data.max_refused_share` allows.
    """
    renderer = ChatRenderer(tokenizer, config, model_folder)
    builder = _SampleBuilder(config, renderer, teacher, window)
    train, refused, rows_read = builder.read(seed=seed)
    if not config.heldout_rows:
        heldout: list[Prompt | Sample] = []
    elif config.heldout_source is not None:
        candidates, refused_heldout, heldout_rows_read = builder.read(seed=seed, heldout=True)
        refused, rows_read = refused + refused_heldout, rows_read + heldout_rows_read
        heldout = _choose_heldout(candidates, config.heldout_rows, seed)
    else:
        heldout = _choose_heldout(train, config.heldout_rows, seed)
    train, twins = _without_heldout(train, heldout)
    if not train:
        raise ValueError(
            f"no row is left to train on: data.heldout_rows is {config.heldout_rows} and every prompt of "
            f"data.source {config.source!r} is held out; lower it or give a data.heldout_source of other prompts"
        )
    report = RefusalReport((*refused, *twins), rows_read)
    return PreparedData(train=train, heldout=heldout, refused=report, renderer=renderer)


def check_enough(train: Sequence[Prompt | Sample], samples_per_step: int, max_epochs: int | None) -> int | None:
    """Give how many steps the data allows, None when there is no limit.

    A step at the end of an epoch is filled up from the next epoch; the last step of the last epoch may be smaller.

    Raises:
        ValueError: there are fewer samples than one step needs, so that a step would hold a sample twice.
    """
    if len(train) < samples_per_step:
        raise ValueError(
            f"run.samples_per_step is {samples_per_step}, but only {len(train)} usable rows are left to train on; "
            "lower it, give more rows, or see the refused rows"
        )
    return None if max_epochs is None else math.ceil(len(train) * max_epochs / samples_per_step)


class _SampleBuilder:
    """Turns rows into samples under one config."""

    def __init__(self, config: DataConfig, renderer: ChatRenderer, teacher: str, window: int | None) -> None:
        self._config = config
        self._renderer = renderer
        self._teacher = teacher
        self._window = window

    def read(self, *, seed: int, heldout: bool = False) -> tuple[list[Prompt | Sample], list[RefusedRow], int]:
        """Give a source's samples, its refused rows, and how many rows it has."""
        rows = read_rows(self._config, seed=seed, heldout=heldout)
        self._check_columns([row for row in rows if isinstance(row, Row)])
        samples: list[Prompt | Sample] = []
        refused: list[RefusedRow] = []
        for row in rows:
            if isinstance(row, RefusedRow):
                refused.append(row)
                continue
            try:
                samples.append(self._sample(row))
            except RowRefusedError as error:
                refused.append(RefusedRow(row.location, error.reason, error.detail))
        _check_share(self._config, refused, len(rows), heldout=heldout)
        return samples, refused, len(rows)

    def _check_columns(self, rows: list[Row]) -> None:
        if self._config.messages_column:
            check_column(rows, self._config.messages_column, "data.messages_column")
        else:
            check_column(rows, self._config.prompt_column, "data.prompt_column")
            if self._config.response_column is not None:
                check_column(rows, self._config.response_column, "data.response_column")

    def _sample(self, row: Row) -> Prompt | Sample:
        if self._config.response_column is None:
            prompt_ids = self._prompt_alone(row)
            self._check_prompt(prompt_ids)
            return Prompt(sample_id=row.location, prompt_ids=prompt_ids, teacher=self._teacher, meta=row.values)
        prompt_ids, answer = self._prompt_and_answer(row)
        if self._config.answer_processor == "gsm8k":
            answer = GSM8K_CALCULATOR_MARK.sub("", answer)
        if not answer:
            raise RowRefusedError("empty response")
        response_ids, finish_reason = self._fit(prompt_ids, self._renderer.answer_ids(answer))
        return Sample(
            sample_id=row.location,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            loss_mask=np.ones(len(response_ids), dtype=np.bool_),
            finish_reason=finish_reason,
            source="dataset",
            teacher=self._teacher,
            meta=row.values,
        )

    def _prompt_alone(self, row: Row) -> NDArray[np.int32]:
        if not self._config.messages_column:
            question = lookup(row.values, self._config.prompt_column)
            if question is None:
                raise RowRefusedError("no prompt")
            return self._renderer.question_ids(question)
        messages = lookup(row.values, self._config.messages_column)
        if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
            raise RowRefusedError("malformed messages", "a list of messages is needed")
        if messages[-1].get("role") == "assistant":
            detail = "without data.response_column the last message must not be the assistant's"
            raise RowRefusedError("the conversation is answered already", detail)
        return self._renderer.prompt_ids(messages)

    def _check_prompt(self, prompt_ids: NDArray[np.int32]) -> None:
        tokens, limit = len(prompt_ids), self._config.max_prompt_tokens
        if tokens > limit:
            raise RowRefusedError("overlong prompt", f"{tokens} tokens, data.max_prompt_tokens is {limit}")

    def _prompt_and_answer(self, row: Row) -> tuple[NDArray[np.int32], str]:
        if self._config.messages_column:
            messages = lookup(row.values, self._config.messages_column)
            if messages is None:
                raise RowRefusedError("no messages")
            before, answer = _cut_answer(messages)
            return self._renderer.prompt_ids(before), answer
        prompt = lookup(row.values, self._config.prompt_column)
        assert self._config.response_column is not None
        response = lookup(row.values, self._config.response_column)
        if prompt is None:
            raise RowRefusedError("no prompt")
        if response is None:
            raise RowRefusedError("no response")
        return self._renderer.question_ids(prompt), content_text(response)

    def _fit(
        self, prompt_ids: NDArray[np.int32], response_ids: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], FinishReason]:
        """Give the response within the limits, and how it ended."""
        config, prompt_tokens, tokens = self._config, len(prompt_ids), len(response_ids)
        self._check_prompt(prompt_ids)
        limit = config.max_response_tokens
        room = limit if self._window is None else self._window - prompt_tokens
        if tokens <= min(limit, room):
            return response_ids, "stop"
        if config.overlong_response == "truncate" and room > 0:
            return response_ids[:-1][: min(limit, room)], "length"
        if tokens > limit:
            raise RowRefusedError("overlong response", f"{tokens} tokens, data.max_response_tokens is {limit}")
        detail = f"{prompt_tokens} prompt and {tokens} response tokens, the window is {self._window}"
        raise RowRefusedError("does not fit the models' context", detail)


def _cut_answer(messages: object) -> tuple[list[Any], str]:
    """Give the messages before the last, and the text of the last: the assistant's, and nothing but text."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(messages, list) or not isinstance(last, dict):
        raise RowRefusedError("malformed messages", "a list of messages that ends in the assistant's answer is needed")
    if last.get("role") != "assistant":
        raise RowRefusedError("no response", f"the last message has role {last.get('role')!r}, not 'assistant'")
    if len(messages) == 1:
        raise RowRefusedError("no prompt", "the answer is the only message")
    others = [name for name in NOT_TEXT_FIELDS if last.get(name)]
    if others:
        raise RowRefusedError("the answer is more than text", f"it has {', '.join(others)}; write it into content")
    if last.get("content") is None:
        raise RowRefusedError("no response")
    return messages[:-1], content_text(last["content"])


def _check_share(config: DataConfig, refused: list[RefusedRow], rows: int, *, heldout: bool) -> None:
    share = len(refused) / rows
    if len(refused) < rows and share <= config.max_refused_share:
        return
    field, source = ("heldout_source", config.heldout_source) if heldout else ("source", config.source)
    limit = f"more than data.max_refused_share ({config.max_refused_share:g}) allows" if len(refused) < rows else "all"
    remedy = "mend them" if len(refused) == rows else "mend them, or raise data.max_refused_share"
    report = RefusalReport(tuple(refused), rows)
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.counts.items())
    raise TooManyRefusedError(
        f"data.{field} is {source!r}, of which {len(refused)} of {rows} rows ({share:.1%}) cannot be used, {limit}: "
        f"{reasons}. {first_few(refused)} To go on, {remedy}, or change the data settings they name",
        report,
    )


def _choose_heldout(samples: list[Prompt | Sample], count: int, seed: int) -> list[Prompt | Sample]:
    """Give `count` samples of distinct prompts, fewer when there are not as many.

    The choice goes by a seeded hash of the prompt: it does not depend on the order of the rows, and new rows push out
    only as many as they replace.
    """
    by_prompt: dict[bytes, Prompt | Sample] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_ids.tobytes(), sample)
    rank = {p: hashlib.blake2b(p, digest_size=16, key=str(seed).encode()).digest() for p in by_prompt}
    return [by_prompt[prompt] for prompt in sorted(by_prompt, key=rank.__getitem__)[:count]]


def _without_heldout(
    train: list[Prompt | Sample], heldout: list[Prompt | Sample]
) -> tuple[list[Prompt | Sample], list[RefusedRow]]:
    """Give the samples whose prompt is not held out, and as refused those that only share a prompt."""
    held = {sample.prompt_ids.tobytes(): sample for sample in heldout}
    kept: list[Prompt | Sample] = []
    twins: list[RefusedRow] = []
    for sample in train:
        twin = held.get(sample.prompt_ids.tobytes())
        if twin is None:
            kept.append(sample)
        elif twin is not sample:
            twins.append(RefusedRow(sample.sample_id, HELDOUT_TWIN, twin.sample_id))
    return kept, twins


class DatasetSource:
    """A `SampleSource` of the data set's own answers, in an order that depends on (seed, epoch, index) only.

    Epochs follow each other without a gap: where one ends within a step, the step is filled up from the next. The last
    step of the last epoch may be smaller.
    """

    def __init__(
        self, samples: Sequence[Prompt | Sample], *, seed: int, shuffle: bool = True, max_epochs: int | None = None
    ) -> None:
        """Start at the first sample of the first epoch; `shuffle=False` keeps the given order."""
        if not samples:
            raise ValueError("a data set source needs at least one sample")
        if seed < 0:
            raise ValueError(f"run.seed is {seed}; it must not be negative")
        self._samples = list(samples)
        self._seed = seed
        self._shuffle = shuffle
        self._max_epochs = max_epochs
        self._epoch = 0
        self._index = 0
        self._order = self._epoch_order()
        self._identity = {"data": _fingerprint(self._samples), "seed": seed, "shuffle": shuffle}

    def _epoch_order(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self._samples))
        seeds = np.random.SeedSequence([self._seed, self._epoch])
        return np.random.Generator(np.random.PCG64(seeds)).permutation(len(self._samples))

    async def next_samples(self, count: int) -> list[Prompt | Sample]:
        """Give the next `count` samples, fewer only at the end of the last epoch; ids end in `#1` in the first."""
        taken: list[Prompt | Sample] = []
        while len(taken) < count:
            if self._index == len(self._samples):
                if self._epoch + 1 == self._max_epochs:
                    break
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._epoch_order()
            sample = self._samples[self._order[self._index]]
            taken.append(dataclasses.replace(sample, sample_id=f"{sample.sample_id}#{self._epoch + 1}"))
            self._index += 1
        return taken

    def state(self) -> Mapping[str, Any]:
        """Give what is needed to go on from here (JSON types)."""
        return {**self._identity, "epoch": self._epoch, "index": self._index}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`, exactly as if there had been no break.

        Raises:
            ValueError: the state was made with other data, another seed or another order.
        """
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"the saved place in the data was made with {name} {state.get(name)!r}, this run has {mine!r}; "
                    "go on with the same data and settings, or start a new run"
                )
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self._order = self._epoch_order()


def _fingerprint(samples: Sequence[Prompt | Sample]) -> str:
    """Give a hash of the samples and their order."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        name = sample.sample_id.encode()
        response = sample.response_ids.tobytes() if isinstance(sample, Sample) else b""
        digest.update(f"{len(name)} {len(sample.prompt_ids)} {len(response)} ".encode())
        digest.update(name + sample.prompt_ids.tobytes() + response)
    return digest.hexdigest()
