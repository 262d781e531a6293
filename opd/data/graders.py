"""Judges the student's answers to held-out prompts: 1 is right.

    answer (text) ──► final answer ──┐
                                     ├──► grade in [0, 1] ──► answer_summary
    row (Sample.meta) ──► reference ─┘

A grader takes any text: what cannot be read is wrong, and what cannot be judged in time is wrong too. Such answers are
not rare: a student that repeats itself writes `9**9**9**9`, and some scorers compute it.

The time limit is `math_verify`'s, an alarm signal. So answers are judged in the main thread, where the driver's event
loop runs; it stands still meanwhile, for milliseconds as a rule.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from opd.config import DataConfig
from opd.data.messages import content_text
from opd.data.rows import lookup
from opd.types import Prompt, Sample

TIMEOUT_S = 5
"""Longest time for each part of judging an answer; whole seconds, as alarms are."""

FINAL_MARK = "####"
"""What GSM8K, and what is made like it, writes before the final answer."""

NUMBER = re.compile(
    r"(?:(?<![\w.)])-[$£€]?|[$£€]-?)?"  # the minus of `10-5` is no sign
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)",
    re.ASCII,
)
PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
"""What reasoning_gym's scorers raise at an answer that is not of the form they ask for; most return 0 instead."""


class Grader(ABC):
    """Judges answers to the rows of one source."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config

    @abstractmethod
    def grade(self, answer: str, sample: Prompt | Sample) -> float:
        """Give how right an answer is, from 0 to 1; 0 too where the reference itself cannot be read.

        Args:
            answer: the student's text, without control tokens.
            sample: of the prompt that was answered; `meta` is its row.

        Raises:
            ValueError: not called in the main thread.
        """

    @abstractmethod
    def can_grade(self, sample: Prompt | Sample) -> bool:
        """Whether the sample's row holds a reference that this grader can read."""

    def check(self, samples: Sequence[Prompt | Sample]) -> None:
        """Stop when the grader does not fit the held-out samples, as far as their rows tell.

        Raises:
            ValueError: more of their references cannot be read than `data.max_refused_share` allows.
        """
        unfit = [sample.sample_id for sample in samples if not self.can_grade(sample)]
        if len(unfit) > self._config.max_refused_share * len(samples):
            raise ValueError(
                f"data.grader is {self._config.grader!r}, but it cannot read the reference of {len(unfit)} of "
                f"{len(samples)} held-out rows, more than data.max_refused_share "
                f"({self._config.max_refused_share:g}) allows: {', '.join(unfit[:5])}{' ...' * (len(unfit) > 5)}. "
                'Use a grader that fits the rows, or "none", or mend them'
            )

    def _reference(self, sample: Prompt | Sample) -> str:
        """Give the row's own answer, as it is in the row."""
        assert self._config.response_column is not None, "make_grader sees to it"
        if self._config.messages_column is None:
            return content_text(lookup(sample.meta, self._config.response_column))
        messages: Any = lookup(sample.meta, self._config.messages_column)
        return content_text(messages[-1]["content"])


def make_grader(config: DataConfig, *, seed: int) -> Grader | None:
    """Give the grader of `data.grader`, None for `none`.

    Args:
        config: names the grader, and where the references are.
        seed: of the run; reasoning_gym wants one to make a task.

    Raises:
        ValueError: the held-out rows are of no reasoning_gym task, and the grader is; or they have no reference.
    """
    match config.grader:
        case "none":
            return None
        case "gsm8k" | "math_verify" if config.response_column is None:
            raise ValueError(
                f"data.grader is {config.grader!r}, which compares with a reference, but data.response_column is none; "
                'name the column that has it, or use grader "none"'
            )
        case "gsm8k":
            return Gsm8kGrader(config)
        case "math_verify":
            return MathVerifyGrader(config)
        case "reasoning_gym":
            return TaskGrader(config, seed)


class Gsm8kGrader(Grader):
    """Compares final numbers: 1 when they are equal, else 0.

    The reference's is the first after its last `####`; so is the answer's, or the last in it where it has no `####`.
    `1,234`, `$1234`, `1234.00` and `1234.` are one number, and `5%` is 5.
    """

    def grade(self, answer: str, sample: Prompt | Sample) -> float:
        """Give 1 when the final numbers are equal, else 0."""
        expected = self._expected(sample)
        marked = _after_mark(answer)
        found = _numbers(answer)[-1:] if marked is None else _numbers(marked)[:1]
        return float(expected is not None and found == [expected])

    def can_grade(self, sample: Prompt | Sample) -> bool:
        """Whether a number follows the last `####` of the reference."""
        return self._expected(sample) is not None

    def _expected(self, sample: Prompt | Sample) -> Decimal | None:
        found = _numbers(_after_mark(self._reference(sample)) or "")
        return found[0] if found else None


class MathVerifyGrader(Grader):
    r"""Asks `math_verify` whether two expressions are equal: 1 or 0.

    The reference's is in its last `\boxed{}` where it has one. Else it is what stands after the last `####`, or the
    whole reference, read as LaTeX where it is one line, with or without the dollar signs. The answer's is what stands
    after the last `####`, or what `math_verify` finds in it.
    """

    def grade(self, answer: str, sample: Prompt | Sample) -> float:
        """Give 1 when answer and reference are equal, else 0."""
        from math_verify import parse, verify  # here: with sympy it takes a second

        marked = _after_mark(answer)
        found = parse(answer if marked is None else marked, parsing_timeout=TIMEOUT_S)
        return float(verify(self._expected(sample), found, timeout_seconds=TIMEOUT_S))

    def can_grade(self, sample: Prompt | Sample) -> bool:
        """Whether there is an expression in the reference; `math_verify` gives what it cannot read back as text."""
        return any(not isinstance(expression, str) for expression in self._expected(sample))

    def _expected(self, sample: Prompt | Sample) -> list[Any]:
        from math_verify import LatexExtractionConfig, parse

        text = self._reference(sample).strip()
        _, boxed, content = text.rpartition(r"\boxed")
        if boxed:
            # First of all, since by its own order it looks at phrases like "the final answer is" before.
            target = [LatexExtractionConfig(boxed_match_priority=0)]
            return parse(boxed + content, target, parsing_timeout=TIMEOUT_S)
        text = (_after_mark(text) or text).strip()
        delimited = any(sign in text for sign in ("$", r"\(", r"\[", "\n"))
        return parse(text if delimited else f"${text}$", parsing_timeout=TIMEOUT_S)


class TaskGrader(Grader):
    """The own scorer of a reasoning_gym task, which may give part of a point.

    The scorer wants the final answer alone. That is what stands after the last `####`, else in the last
    `<answer>...</answer>`. Where the task's own answer is a number, it is the first number of that text, or the last
    number of the whole answer where neither is there; commas and currency signs are taken off. In any other task an
    unmarked answer is taken whole.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        """Make the task that the held-out rows come from."""
        super().__init__(config)
        field = "data.source" if config.heldout_source is None else "data.heldout_source"
        source = config.heldout_source or config.source
        kind, _, task = source.partition(":")
        if kind != "reasoning_gym":
            raise ValueError(
                f'data.grader is "reasoning_gym", but {field} is {source!r}, which is no task of it; '
                'use reasoning_gym:TASK, or grader "gsm8k", "math_verify" or "none"'
            )
        from reasoning_gym import create_dataset  # here: it takes over a second

        self._score = create_dataset(task, seed=seed, size=1, **config.task_options).score_answer

    def grade(self, answer: str, sample: Prompt | Sample) -> float:
        """Give what the task's scorer gives; 0 too for what it cannot read, or not within `TIMEOUT_S`."""
        from math_verify.errors import TimeoutException
        from math_verify.utils import timeout

        entry = dict(sample.meta)
        final = _final_answer(answer, number=PLAIN_NUMBER.fullmatch(str(entry["answer"])) is not None)

        def score() -> float:
            try:
                return float(self._score(final, entry))
            except UNREADABLE:
                return 0.0

        try:
            return timeout(TIMEOUT_S)(score)()
        except TimeoutException:
            return 0.0

    def can_grade(self, sample: Prompt | Sample) -> bool:
        """Whether the scorer finds the row's own answer right; a row without one, as some tasks make, is trusted."""
        answer = sample.meta["answer"]
        return answer is None or self.grade(str(answer), sample) == 1


def answer_summary(samples: Sequence[Sample], grades: Sequence[float] | None) -> dict[str, float]:
    """Give the metrics of answers to held-out prompts.

    Args:
        samples: the answers, at least one.
        grades: of each, None when there is no grader. An answer counts as right when it has the whole point, since a
            task may give some of it for the form alone (gsm_symbolic: 0.01 for any number).
    """
    ended = float(np.mean([s.finish_reason == "stop" for s in samples]))
    summary = {
        "heldout/response_tokens_mean": float(np.mean([len(s.response_ids) for s in samples])),
        "heldout/truncated_share": 1.0 - ended,
        "heldout/ended_share": ended,
    }
    if grades is not None:
        summary["heldout/accuracy"] = sum(grade == 1 for grade in grades) / len(samples)
    return summary


def _after_mark(text: str) -> str | None:
    """Give what stands after the last `####`, None where there is none."""
    _, mark, after = text.rpartition(FINAL_MARK)
    return after if mark else None


def _number_texts(text: str) -> list[str]:
    return [re.sub(r"[$£€,]", "", match.group()) for match in NUMBER.finditer(text)]


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number) for number in _number_texts(text)]


def _final_answer(answer: str, *, number: bool) -> str:
    """Give the part of an answer that a task's scorer wants, by the rule of `TaskGrader`."""
    from reasoning_gym.utils import extract_answer

    marked = _after_mark(answer)
    if marked is None:
        marked = extract_answer(answer)
    text = answer if marked is None else marked
    numbers = _number_texts(text) if number else []
    if not numbers:
        return text.strip()
    return numbers[-1 if marked is None else 0]
