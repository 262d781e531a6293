"""Student and teacher must mean the same by a token id: checked here, once, before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIFFERENCES_SHOWN = 4


def check_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, where: str) -> None:
    """Stop unless every id stands for the same token in both tokenizers.

    Args:
        student: The tokenizer that makes the ids.
        teacher: The tokenizer of the model that is asked about them.
        where: The teacher's setting, as `teachers.0.model 'NAME'`.

    Raises:
        ValueError: they differ; says how often, and shows the first differing ids.
    """
    mine = {i: token for token, i in student.get_vocab().items()}
    theirs = {i: token for token, i in teacher.get_vocab().items()}
    differing = sorted(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    if not differing:
        return
    first = "; ".join(
        f"id {i} is {_shown(mine.get(i))} for the student, {_shown(theirs.get(i))} for the teacher"
        for i in differing[:_DIFFERENCES_SHOWN]
    )
    raise ValueError(
        f"{where} has another tokenizer than the student: of {len(mine)} and {len(theirs)} tokens, {len(differing)} "
        f"ids differ. {first}. The teacher scores the student's own token ids, so both must have the same tokenizer; "
        "choose a teacher of the student's family"
    )


def token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give how many ids the tokenizer needs: its highest id and one."""
    return max(tokenizer.get_vocab().values()) + 1


def shared_vocab_size(needed_ids: int, rows: dict[str, int]) -> int:
    """Give the number of ids on which the models are compared: the smallest embedding height.

    Args:
        needed_ids: What the tokenizer needs; rows beyond it are padding.
        rows: A model's setting, as `student.model 'NAME'` → rows of its embedding.

    Raises:
        ValueError: a model has too few rows for its own tokenizer.
    """
    for where, height in rows.items():
        if height < needed_ids:
            raise ValueError(
                f"{where} has {height} embedding rows, but its tokenizer has ids up to {needed_ids - 1}; "
                "resize its embeddings, or take the added tokens out of its tokenizer"
            )
    return min(rows.values())


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
