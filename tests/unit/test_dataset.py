"""Rows to samples, held-out rows, refusals, and the order of training."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opd.config import DataConfig
from opd.data.dataset import DatasetSource, PreparedData, check_enough, prepare
from opd.data.refusals import HELDOUT_TWIN, TooManyRefusedError
from opd.types import Prompt, Sample
from tests.fakes import BOS, CHATML_WITH_BOS, CHATML_WITHOUT_SYSTEM, IM_END, byte_tokenizer

TOKENIZER = byte_tokenizer()


def row(number: int, **more: object) -> dict[str, Any]:
    return {"question": f"what is {number}?", "answer": f"it is {number}", **more}


def write(folder: Path, rows: list[Any], name: str = "train.jsonl") -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / name).write_text("".join(line + "\n" for line in lines))
    return str(folder / name)


def prepared(source: str, window: int | None = None, seed: int = 0, **options: object) -> PreparedData:
    config = DataConfig.model_validate({"source": source, "heldout_rows": 0, **options})
    return prepare(config, TOKENIZER, teacher="big", seed=seed, window=window)


def ids(rows: Sequence[Prompt | Sample]) -> list[str]:
    return [row.sample_id for row in rows]


def answered(data: PreparedData) -> list[Sample]:
    """The rows to train on, all of which have an answer."""
    samples = [row for row in data.train if isinstance(row, Sample)]
    assert len(samples) == len(data.train)
    return samples


def text(array: np.ndarray) -> str:
    return str(TOKENIZER.decode(array.tolist()))


def test_a_row_becomes_a_sample_that_ends_in_the_end_token(tmp_path: Path) -> None:
    """B13: ids once, from here on; B25: the row is carried whole, its other columns not lost and not tokenised."""
    values = row(1, tag={"level": [1, None]}, id="x")
    sample = answered(prepared(write(tmp_path, [values])))[0]
    assert sample.sample_id == "train.jsonl:1"
    assert text(sample.prompt_ids) == "<|im_start|>user\nwhat is 1?<|im_end|>\n<|im_start|>assistant\n"
    assert text(sample.response_ids) == "it is 1<|im_end|>"
    assert sample.response_ids.tolist().count(IM_END) == 1
    assert sample.loss_mask.all()
    assert (sample.finish_reason, sample.source, sample.teacher) == ("stop", "dataset", "big")
    assert sample.meta == values


def test_nested_columns_and_calculator_marks(tmp_path: Path) -> None:
    source = write(tmp_path, [row(1, metadata={"cot": "48/2 = <<48/2=24>>24\n#### <<x>>24"})])
    sample = answered(prepared(source, response_column="metadata.cot", answer_processor="gsm8k"))[0]
    assert text(sample.response_ids) == "48/2 = 24\n#### 24<|im_end|>"
    assert sample.meta["answer"] == "it is 1"
    assert sample.meta["metadata"]["cot"].startswith("48/2 = <<")


def test_messages_end_in_the_answer(tmp_path: Path) -> None:
    """B14: one BOS in chat rows too."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    source = write(tmp_path, [{"messages": chat, "id": 7}])
    config = DataConfig.model_validate(
        {"source": source, "heldout_rows": 0, "messages_column": "messages", "system_prompt": "Be brief."}
    )
    tokenizer = byte_tokenizer(CHATML_WITH_BOS, adds_bos=True)
    sample = answered(prepare(config, tokenizer, teacher="big", seed=0))[0]
    start = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text(sample.prompt_ids) == start
    assert [*sample.prompt_ids, *sample.response_ids].count(BOS) == 1
    assert text(sample.response_ids) == "ho<|im_end|>"
    assert sample.meta == {"messages": chat, "id": 7}


def test_rows_from_json_lines_and_parquet_give_the_same_samples(tmp_path: Path) -> None:
    """B23, B22: null fields, text parts and nested lists alike."""
    call = [{"function": {"name": "f", "arguments": {"x": "1"}}}]
    answer = {"role": "assistant", "content": "ho"}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, answer], "teacher_prompt": None},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": call},
                {"role": "tool", "content": "7"},
                answer,
            ],
            "teacher_prompt": "Hint.",
        },
    ]
    source = write(tmp_path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    one = answered(prepared(source, messages_column="messages"))
    two = answered(prepared(str(tmp_path / "train.parquet"), messages_column="messages"))
    for a, b in zip(one, two, strict=True):
        assert a.prompt_ids.tolist() == b.prompt_ids.tolist()
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert a.meta["teacher_prompt"] == b.meta["teacher_prompt"]


# Refusals


@pytest.mark.parametrize(
    ("bad", "options", "reason"),
    [
        ({"question": "hi", "answer": None}, {}, "no response"),
        ({"question": "hi"}, {}, "no response"),
        ({"answer": "ho"}, {}, "no prompt"),
        (row(1, question=" "), {}, "empty prompt"),
        (row(1, answer=""), {}, "empty response"),
        (row(1, answer="<<1+1=2>>"), {"answer_processor": "gsm8k"}, "empty response"),
        (row(1, answer=["ho"]), {}, "content is not text"),
        (row(1, question="what " * 100), {}, "overlong prompt"),
        (row(1, answer="what " * 100), {}, "overlong response"),
        (row(1, answer="<|im_end|> no"), {"control_text": "refuse"}, "text spells a control token"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_reason(
    tmp_path: Path, bad: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """B08: no response; B20: control text; B22: content that is no text; B28: empty response; B29: too long."""
    source = write(tmp_path, [row(2), bad, row(3)])
    data = prepared(source, max_refused_share=0.5, max_prompt_tokens=64, max_response_tokens=64, **options)
    assert ids(data.train) == ["train.jsonl:1", "train.jsonl:3"]
    assert [(r.location, r.reason) for r in data.refused.rows] == [("train.jsonl:2", reason)]
    assert data.refused.rows_read == 3


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "hi"}], "no response"),
        ([{"role": "assistant", "content": "ho"}], "no prompt"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], "no response"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}], "empty response"),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [{}]}],
            "the answer is more than text",
        ),
        ("hi", "malformed messages"),
    ],
)
def test_messages_without_a_usable_answer_are_refused(tmp_path: Path, messages: object, reason: str) -> None:
    """B08, B22: the last message must be the assistant's text."""
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    source = write(tmp_path, [{"messages": messages}, {"messages": good}])
    data = prepared(source, messages_column="messages", max_refused_share=0.5)
    assert [r.reason for r in data.refused.rows] == [reason]


def test_rows_with_only_prompts_stop_the_run(tmp_path: Path) -> None:
    """B08: every label would be masked and the loss exactly 0."""
    source = write(tmp_path, [{"prompt": "Name a river."}] * 4)
    with pytest.raises(ValueError, match=r"data\.response_column is 'answer'.*The columns are: prompt"):
        prepared(source, prompt_column="prompt")
    source = write(tmp_path, [{"prompt": "Name a river.", "answer": None}] * 4)
    with pytest.raises(TooManyRefusedError, match="4 no response"):
        prepared(source, prompt_column="prompt", max_refused_share=1.0)


def test_ten_rows_of_which_three_are_bad(tmp_path: Path) -> None:
    """B25: three named with line numbers, seven kept; in strict mode an error that shows them."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows: list[Any] = [{"messages": chat} for _ in range(10)]
    rows[2] = '{"messages": ['
    rows[4] = {"text": "hi"}
    rows[6] = {"messages": [{"role": "bot", "content": "hi"}, chat[1]]}
    rows[8] = {"messages": chat, "extra": {"deep": [1, {"x": None}]}}
    source = write(tmp_path, rows)
    data = prepared(source, messages_column="messages", max_refused_share=0.3)
    assert [(r.location, r.reason) for r in data.refused.rows] == [
        ("train.jsonl:3", "malformed JSON"),
        ("train.jsonl:5", "no messages"),
        ("train.jsonl:7", "unknown role"),
    ]
    assert len(data.train) == 7
    assert data.train[5].meta == rows[8]
    with pytest.raises(TooManyRefusedError, match=r"3 of 10 rows .*train\.jsonl:3: malformed JSON") as error:
        prepared(source, messages_column="messages")
    assert "data.max_refused_share" in str(error.value)
    assert len(error.value.report.rows) == 3


def test_rows_without_answers_are_prompts_for_the_student(tmp_path: Path) -> None:
    rows = [{"question": f"what is {n}?", "level": n} for n in range(4)]
    rows[1]["question"] = "what is " + "a fruit? " * 60
    data = prepared(
        write(tmp_path, rows), response_column=None, max_prompt_tokens=30, max_refused_share=0.5, heldout_rows=1
    )
    assert all(isinstance(prompt, Prompt) for prompt in (*data.train, *data.heldout))
    assert sorted(ids([*data.train, *data.heldout])) == [f"train.jsonl:{n}" for n in (1, 3, 4)]
    assert text(data.train[0].prompt_ids).startswith("<|im_start|>user\nwhat is ")
    assert data.train[0].meta["level"] in (0, 2, 3)
    assert [refused.reason for refused in data.refused.rows] == ["overlong prompt"]


def test_conversations_without_an_answer_end_in_the_question(tmp_path: Path) -> None:
    asked = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "?"},
    ]
    rows = [{"messages": asked}, {"messages": asked[:2]}, {"messages": "hi"}]
    data = prepared(write(tmp_path, rows), messages_column="messages", response_column=None, max_refused_share=0.9)
    (prompt,) = data.train
    assert text(prompt.prompt_ids).endswith("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
    assert [refused.reason for refused in data.refused.rows] == [
        "the conversation is answered already",
        "malformed messages",
    ]


def test_a_template_without_system_role_stops_before_models_load(tmp_path: Path) -> None:
    """B21: the error names the row, the template's words and the remedy."""
    source = write(tmp_path, [row(1), row(2)])
    config = DataConfig.model_validate({"source": source, "heldout_rows": 0, "system_prompt": "Be brief."})
    tokenizer = byte_tokenizer(CHATML_WITHOUT_SYSTEM)
    with pytest.raises(ValueError, match=r'train\.jsonl:1: .*no system message.*data\.system_role="merge"'):
        prepare(config, tokenizer, teacher="big", seed=0)
    merged = config.model_copy(update={"system_role": "merge"})
    assert len(prepare(merged, tokenizer, teacher="big", seed=0).train) == 2


def test_an_answer_of_only_the_end_token_trains(tmp_path: Path) -> None:
    """B28: one response token, one trained token."""
    sample = answered(prepared(write(tmp_path, [row(1, answer="<|im_end|>")])))[0]
    assert sample.response_ids.tolist() == [IM_END]
    assert sample.loss_mask.tolist() == [True]


# Lengths


def test_a_cut_answer_gets_no_end_token(tmp_path: Path) -> None:
    """B16: the first tokens as they are, finish reason `length`, and no end token in the last place."""
    source = write(tmp_path, [row(1, answer="abcdefgh"), row(2, answer="abc"), row(3, answer="abcd")])
    whole, fitting, just_cut = answered(prepared(source, max_response_tokens=4, overlong_response="truncate"))
    assert (text(whole.response_ids), whole.finish_reason) == ("abcd", "length")
    assert (text(fitting.response_ids), fitting.finish_reason) == ("abc<|im_end|>", "stop")
    assert (text(just_cut.response_ids), just_cut.finish_reason) == ("abcd", "length")


def test_prompt_and_answer_must_fit_the_models_context_together(tmp_path: Path) -> None:
    """B29: known when the data are read, with the row's name; nothing is left for an engine to refuse."""
    source = write(tmp_path, [row(1), row(2, answer="z" * 40)])
    prompt_tokens = len(prepared(source).train[0].prompt_ids)
    data = prepared(source, window=prompt_tokens + 20, max_refused_share=0.5)
    assert [(r.location, r.reason) for r in data.refused.rows] == [
        ("train.jsonl:2", "does not fit the models' context")
    ]
    cut = answered(prepared(source, window=prompt_tokens + 20, overlong_response="truncate"))[1]
    assert (len(cut.response_ids), cut.finish_reason) == (20, "length")
    with pytest.raises(TooManyRefusedError, match="the window is"):
        prepared(source, window=prompt_tokens, overlong_response="truncate")


@pytest.mark.parametrize(("rows", "long"), [(3, 0), (10, 8)])
def test_fewer_rows_than_one_step_stop_the_run(tmp_path: Path, rows: int, long: int) -> None:
    """B27: 3 rows with batch 4; 10 rows of which 8 are over-long."""
    source = write(tmp_path, [row(n, answer="z" * (100 if n < long else 1)) for n in range(rows)])
    train = prepared(source, max_response_tokens=50, max_refused_share=1.0).train
    with pytest.raises(ValueError, match=r"run\.samples_per_step is 4, but only [23] usable rows"):
        check_enough(train, samples_per_step=4, max_epochs=1)


def test_the_planned_steps_count_the_last_smaller_one(tmp_path: Path) -> None:
    """B27: the handling of the last partial batch is fixed."""
    train = answered(prepared(write(tmp_path, [row(n) for n in range(10)])))
    assert check_enough(train, 4, 1) == 3
    assert check_enough(train, 4, 2) == 5
    assert check_enough(train, 10, 1) == 1
    assert check_enough(train, 4, None) is None


# Held-out rows


def test_held_out_rows_are_set_aside_by_a_choice_that_ignores_order(tmp_path: Path) -> None:
    rows = [row(n) for n in range(40)]
    data = prepared(write(tmp_path, rows), heldout_rows=8)
    assert (len(data.train), len(data.heldout)) == (32, 8)
    assert not set(ids(data.train)) & set(ids(data.heldout))

    def held(rows: list[Any], seed: int = 0) -> set[str]:
        return {text(s.prompt_ids) for s in prepared(write(tmp_path, rows), seed=seed, heldout_rows=8).heldout}

    chosen = held(rows)
    assert held(rows[::-1]) == chosen
    assert len(held(rows + [row(n) for n in range(40, 44)]) & chosen) >= 4
    assert held(rows, seed=1) != chosen


def test_prompts_that_are_held_out_are_not_trained_on(tmp_path: Path) -> None:
    """A twin of a held-out row is named, but does not count towards the share of refused rows."""
    rows = [row(n % 20, answer=f"answer {n}") for n in range(40)]
    data = prepared(write(tmp_path, rows), heldout_rows=5)
    assert {r.reason for r in data.refused.rows} == {HELDOUT_TWIN}
    assert (len(data.heldout), len(data.refused.rows), len(data.train)) == (5, 5, 30)
    assert not {text(s.prompt_ids) for s in data.train} & {text(s.prompt_ids) for s in data.heldout}


def test_a_held_out_source_of_its_own(tmp_path: Path) -> None:
    train = write(tmp_path, [row(n) for n in range(10)])
    test = write(tmp_path, [row(n) for n in range(8, 20)], "test.jsonl")
    data = prepared(train, heldout_source=test, heldout_rows=100)
    assert ids(data.train) == [f"train.jsonl:{n}" for n in range(1, 9)]
    assert sorted(ids(data.heldout)) == sorted(f"test.jsonl:{n}" for n in range(1, 13))
    assert {r.location for r in data.refused.rows} == {"train.jsonl:9", "train.jsonl:10"}
    assert data.refused.rows_read == 22


@pytest.mark.parametrize("heldout_source", [None, "train.jsonl"])
def test_holding_everything_out_stops_the_run(tmp_path: Path, heldout_source: str | None) -> None:
    """B27: nothing would be left to train on."""
    source = write(tmp_path, [row(n) for n in range(10)])
    held = heldout_source and str(tmp_path / heldout_source)
    with pytest.raises(ValueError, match=r"no row is left to train on: data\.heldout_rows is 32"):
        prepared(source, heldout_rows=32, heldout_source=held)


# The order of training


def dataset_source(tmp_path: Path, rows: int = 10, **options: Any) -> DatasetSource:
    train = answered(prepared(write(tmp_path, [row(n) for n in range(rows)])))
    return DatasetSource(train, **{"seed": 0, "max_epochs": 3, **options})


def steps(source: DatasetSource, count: int, most: int = 100) -> list[list[str]]:
    """The sample ids of the coming steps."""

    async def run() -> list[list[str]]:
        found: list[list[str]] = []
        while len(found) < most and (batch := await source.next_samples(count)):
            found.append(ids(batch))
        return found

    return asyncio.run(run())


def test_every_epoch_has_every_row_once_in_a_new_order(tmp_path: Path) -> None:
    batches = steps(dataset_source(tmp_path), 10)
    assert [Counter(name.split("#")[0] for name in batch) for batch in batches] == [
        Counter(f"train.jsonl:{n}" for n in range(1, 11))
    ] * 3
    orders = [[name.split("#")[0] for name in batch] for batch in batches]
    assert orders[0] != orders[1] != orders[2]
    assert {name.split("#")[1] for name in batches[1]} == {"2"}
    assert steps(dataset_source(tmp_path), 10) == batches
    assert steps(dataset_source(tmp_path, seed=1), 10) != batches
    in_order = steps(dataset_source(tmp_path, shuffle=False, max_epochs=1), 10)
    assert in_order == [[f"train.jsonl:{n}#1" for n in range(1, 11)]]


def test_epochs_follow_without_a_gap_and_only_the_last_step_is_smaller(tmp_path: Path) -> None:
    """B27: no row is dropped at an epoch's end."""
    batches = steps(dataset_source(tmp_path), 4)
    assert [len(batch) for batch in batches] == [4] * 7 + [2]
    assert len({name for batch in batches for name in batch}) == 30


@pytest.mark.parametrize("stop", range(16))
def test_resuming_gives_the_unbroken_stream(tmp_path: Path, stop: int) -> None:
    """B41: 10 rows, batch 2, 3 epochs, stopped at any step, the 7th among them; the state survives JSON."""
    unbroken = steps(dataset_source(tmp_path), 2)
    assert len(unbroken) == 15
    first = dataset_source(tmp_path)
    assert steps(first, 2, most=stop) == unbroken[:stop]
    state = json.loads(json.dumps(first.state()))
    second = dataset_source(tmp_path)
    second.restore(state)
    assert steps(second, 2) == unbroken[stop:]


def test_a_place_in_other_data_is_refused(tmp_path: Path) -> None:
    """B41: going on elsewhere would train some rows twice and others never."""
    state = dataset_source(tmp_path).state()
    for other in (
        dataset_source(tmp_path, rows=11),
        dataset_source(tmp_path, seed=1),
        dataset_source(tmp_path, shuffle=False),
    ):
        with pytest.raises(ValueError, match="saved place in the data was made with"):
            other.restore(state)
    dataset_source(tmp_path, max_epochs=5).restore(state)


def test_a_source_needs_samples_and_a_seed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        DatasetSource([], seed=0)
    with pytest.raises(ValueError, match=r"run\.seed is -1"):
        dataset_source(tmp_path, seed=-1)
