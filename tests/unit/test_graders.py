"""Judging the student's answers: what counts as right, what stops the run, and answers that no one can read."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from opd.config import DataConfig
from opd.data import graders
from opd.data.graders import Grader, answer_summary, make_grader
from opd.data.rows import Row, read_rows
from opd.types import FinishReason, RolloutTrace, Sample


def config(grader: str, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"source": "rows.jsonl", "grader": grader, **more})


def made(grader: str, **more: Any) -> Grader:
    found = make_grader(config(grader, **more), seed=3)
    assert found is not None
    return found


def sample(meta: dict[str, Any], name: str = "s", tokens: int = 2, finish_reason: FinishReason = "stop") -> Sample:
    """An answered prompt; the graders look at its row, the summary at its length and its end."""
    return Sample(
        sample_id=name,
        prompt_ids=np.array([1], np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, np.bool_),
        finish_reason=finish_reason,
        source="rollout",
        teacher="big",
        rollout=RolloutTrace(
            sampling_logprobs=np.zeros(tokens, np.float32), weight_versions=np.zeros(tokens, np.int32)
        ),
        meta=meta,
    )


def task_sample(task: str, number: int = 0, **options: Any) -> Sample:
    """A sample with the row that the run itself would read."""
    rows = read_rows(config("none", source=f"reasoning_gym:{task}", task_rows=number + 1, **options), seed=3)
    row = rows[number]
    assert isinstance(row, Row)
    return sample(dict(row.values), row.location)


def test_no_grader() -> None:
    assert make_grader(config("none"), seed=0) is None


# GSM8K


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("16 - 3 = <<16-3=13>>13\n#### 18", "She has 18 left.", True),
        ("#### 18", "#### 18", True),
        ("#### 18", "18 of 20 #### 18 eggs, not 7", True),
        ("#### 18", "#### 7\nNo:\n#### 18", True),
        ("#### 18", "It is 18.\n####", False),
        ("#### 18", "first 7, then 18.", True),
        ("#### 18", "18, then 7", False),
        ("#### 18", "$18.00", True),
        ("#### 18", "18.01", False),
        ("#### 18", "\\boxed{18}", True),
        ("#### 5", "5%", True),
        ("#### 1,234", "1234", True),
        ("#### 1234", "so $1,234.", True),
        ("#### 13", "12,13", True),
        ("#### -5", "it is -$5", True),
        ("#### -5", "it is $-5", True),
        ("#### 5", "it is -5", False),
        ("#### 5", "= 10-5", True),
        ("#### 0.5", "it is .5", True),
        ("#### -5", "--5", True),
        ("#### 0.3", "0.30000000000000004", False),
        ("#### 18", "I do not know", False),
        ("#### 18", "", False),
        ("no mark, 18", "18", False),
    ],
)
def test_gsm8k_compares_final_numbers(reference: str, answer: str, right: bool) -> None:
    assert made("gsm8k").grade(answer, sample({"answer": reference})) == right


def test_the_reference_is_in_the_configured_column() -> None:
    """Nested columns and chat messages, with the text in parts."""
    row = sample({"question": "2?", "metadata": {"cot": "#### 2"}, "answer": "#### 3"})
    assert made("gsm8k", response_column="metadata.cot").grade("2", row) == 1
    parts = [{"type": "text", "text": "#### "}, {"type": "text", "text": "2"}]
    chat = sample({"chat": [{"role": "user", "content": "#### 3"}, {"role": "assistant", "content": parts}]})
    assert made("gsm8k", messages_column="chat").grade("2", chat) == 1


def test_gsm8k_stops_where_the_references_have_no_mark() -> None:
    """A wrong column would give accuracy 0 for a whole run."""
    rows = [sample({"answer": f"it is {n}"}, f"train.jsonl:{n}") for n in range(7)]
    with pytest.raises(ValueError, match=r"data\.grader is 'gsm8k'.* 7 of 7 .*train\.jsonl:0, .*:4 \.\.\.") as error:
        made("gsm8k").check(rows)
    assert '"none"' in str(error.value)
    rows[1:] = [sample({"answer": f"#### {n}"}) for n in range(9)]
    with pytest.raises(ValueError, match=r"1 of 10 .*data\.max_refused_share \(0\.01\) allows: train\.jsonl:0\. Use"):
        made("gsm8k").check(rows)
    made("gsm8k", max_refused_share=0.1).check(rows)
    made("gsm8k").check(rows[1:])
    made("gsm8k").check([])


# math_verify


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        (r"\frac{1}{2}", "so it is 0.5", True),
        (r"$\frac{1}{2}$", r"The answer is $\frac{2}{4}$.", True),
        (r"The final answer is $7$. I hope it is: \boxed{\frac{1}{2}}", r"\boxed{1/2}", True),
        (r"\boxed{3}, no, \boxed{4}", "4", True),
        (r"\boxed{3}, no, \boxed{4}", "3", False),
        ("3 + 4 = 7\n#### 1,234", "2 and 2\n#### 1234", True),
        ("#### 72", "the answer is 5 #### 72", True),
        ("1,234", "1234", True),
        ("-3", r"$x = -3$", True),
        ("x+1", "$1 + x$", True),
        ("2x+1", "$2x$", False),
        ("2x+1", "$2$", False),
        ("(x-1)(x+1)", r"\boxed{x^2-1}", True),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", True),
        (r"\text{Monday}", r"It is \boxed{\text{Monday}}.", True),
        ("Monday", r"\boxed{Tuesday}", False),
        ("72", "I do not know", False),
        ("72", "", False),
        ("72", r"\boxed{\frac{1}{\frac{", False),
    ],
)
def test_math_verify_compares_expressions(reference: str, answer: str, right: bool) -> None:
    grader, row = made("math_verify"), sample({"answer": reference})
    grader.check([row])
    assert grader.grade(answer, row) == right


def test_math_verify_stops_where_there_is_no_expression() -> None:
    with pytest.raises(ValueError, match="'math_verify', but it cannot read the reference of 1 of 1 held-out rows"):
        made("math_verify").check([sample({"answer": "?"})])


def test_judging_ends_in_time_and_leaves_the_event_loop_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is a signal: it must work under a running loop, and the loop go on after it."""
    monkeypatch.setattr(graders, "TIMEOUT_S", 1)
    task = task_sample("countdown")
    by_task, by_math = made("reasoning_gym", source="reasoning_gym:countdown"), made("math_verify")

    async def main() -> tuple[float, float]:
        grades = by_math.grade("9**9**9**9", sample({"answer": "72"})), by_task.grade("9**9**9**9", task)
        await asyncio.wait_for(asyncio.sleep(0.01), 5)
        return grades

    start = time.monotonic()
    right, part = asyncio.run(main())
    assert right == 0
    assert part < 1
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("grader", ["math_verify", "reasoning_gym"])
def test_judging_in_a_thread_is_an_error_not_a_wrong_answer(grader: str) -> None:
    row = task_sample("gsm_symbolic")
    judge, raised = made(grader, source="reasoning_gym:gsm_symbolic"), []

    def work() -> None:
        try:
            judge.grade("12", row)
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(raised) == 1
    assert "thread" in raised[0]


# reasoning_gym


def test_gsm_symbolic_by_its_own_scorer() -> None:
    """The student is trained on worked answers that end in `#### N`; a wrong number has a hundredth of a point."""
    grader = made("reasoning_gym", source="reasoning_gym:gsm_symbolic", response_column="metadata.answer_cot")
    rows = [task_sample("gsm_symbolic", n) for n in (0, 1, 2)]
    grader.check(rows)
    for row in rows:
        number = int(row.meta["answer"])
        assert grader.grade(row.meta["metadata"]["answer_cot"], row) == 1
        for right in (
            f"3 + 4 = 7, so {number}",
            f"7 <answer> {number}.0 </answer> 7",
            f"#### ${number:,}",
            f"{number}",
        ):
            assert grader.grade(right, row) == 1, right
        for wrong in (f"{number} #### {number + 1}", f"{number} of 7"):
            assert grader.grade(wrong, row) == 0.01, wrong
        for nothing in ("", "I do not know", f"{number} ####"):
            assert grader.grade(nothing, row) == 0, nothing


def test_answers_that_are_no_number_are_taken_whole() -> None:
    """`number_sorting` wants a list: its last number alone would be wrong."""
    grader, row = made("reasoning_gym", source="reasoning_gym:number_sorting"), task_sample("number_sorting")
    grader.check([row])
    reference = row.meta["answer"]
    assert reference.startswith("[")
    for answer in (reference, f" {reference}\n", f"Sorted 3:\n#### {reference}", f"<answer>{reference}</answer> 7"):
        assert grader.grade(answer, row) == 1, answer
    assert grader.grade(f"#### {reference[:-1]}", row) < 1


def test_an_answer_at_which_the_scorer_breaks_is_wrong() -> None:
    """`prime_factorization` raises where others give 0."""
    row = task_sample("prime_factorization")
    grader = made("reasoning_gym", source="reasoning_gym:prime_factorization")
    grader.check([row])
    assert grader.grade("abc", row) == 0


def test_a_task_whose_scorer_cannot_read_a_plain_row_stops_the_run() -> None:
    """`arc_agi` compares tuples, which rows do not have."""
    with pytest.raises(ValueError, match=r"'reasoning_gym', but .* 1 of 1 .*: reasoning_gym:arc_agi:0\. Use"):
        made("reasoning_gym", source="reasoning_gym:arc_agi").check([task_sample("arc_agi")])


def test_the_task_is_that_of_the_held_out_rows() -> None:
    task = "reasoning_gym:gsm_symbolic"
    with pytest.raises(ValueError, match=r"data\.source is 'rows\.jsonl', which is no task"):
        make_grader(config("reasoning_gym"), seed=0)
    with pytest.raises(ValueError, match=r"data\.heldout_source is 'rows\.jsonl', which is no task"):
        make_grader(config("reasoning_gym", source=task, heldout_source="rows.jsonl"), seed=0)
    make_grader(config("reasoning_gym", heldout_source=task), seed=0)


# The summary


def test_the_summary() -> None:
    """Part of a point does not make an answer right."""
    answers = [sample({}, tokens=2), sample({}, tokens=5, finish_reason="length"), sample({}), sample({}, tokens=3)]
    lengths = {
        "heldout/response_tokens_mean": 3.0,
        "heldout/truncated_share": 0.25,
        "heldout/ended_share": 0.75,
    }
    assert answer_summary(answers, None) == lengths
    assert answer_summary(answers, [1.0, 0.01, 0.99, 1.0]) == lengths | {"heldout/accuracy": 0.5}
