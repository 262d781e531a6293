"""What a model's folder says of it, read without loading the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from opd.builtin_models import resolve_model
from opd.config import StudentConfig, TeacherConfig
from opd.estimates import count_parameters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """A model's folder, read but not loaded."""

    setting: str
    """`student.model` or `teachers.0.model`."""
    name: str
    """As the config names it."""
    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    parameters: int
    window: int | None
    """Longest sequence, in tokens; None when the model's config sets no limit."""

    @property
    def where(self) -> str:
        """Setting and value, for messages."""
        return f"{self.setting} {self.name!r}"

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return self.config.get_text_config().vocab_size


def read_model(setting: str, model: StudentConfig | TeacherConfig) -> ModelFacts:
    """Read a model's config, tokenizer and sizes, preparing or downloading it where needed.

    Args:
        setting: `student.model` or `teachers.0.model`, for messages.
        model: names the model.

    Raises:
        ValueError: it cannot be had, or a part of it cannot be read.
    """
    try:
        folder = resolve_model(model.model, model.revision)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting} {model.model!r}: its config.json cannot be used: {_first_line(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{setting} {model.model!r}: no tokenizer can be loaded from {folder}: {_first_line(error)} "
            "Save the model's tokenizer beside its weights"
        ) from error
    return ModelFacts(
        setting=setting,
        name=model.model,
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        parameters=count_parameters(folder),
        window=config.get_text_config().to_dict().get("max_position_embeddings"),
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def shared_window(student: ModelFacts, teachers: Sequence[ModelFacts]) -> int | None:
    """Give the longest sample that the student can learn from and every teacher can score."""
    # vLLM scores a sequence only with room for one more token.
    windows = [student.window, *(None if t.window is None else t.window - 1 for t in teachers)]
    return min((w for w in windows if w is not None), default=None)


def model_warnings(student: ModelFacts, teachers: Sequence[ModelFacts]) -> list[str]:
    """Warn of models that work together, but perhaps not as wanted."""
    warnings = []
    template = student.tokenizer.chat_template
    if template is None:
        warnings.append(f"{student.where} has no chat template: prompts are plain text")
    for teacher in teachers:
        if teacher.folder == student.folder:
            warnings.append(f"{teacher.where} is the student itself: there is nothing to learn from it")
        if template is not None and teacher.tokenizer.chat_template != template:
            state = "no chat template" if teacher.tokenizer.chat_template is None else "another chat template"
            warnings.append(f"{teacher.where} has {state}: it reads prompts in the student's form, foreign to it")
    return warnings
