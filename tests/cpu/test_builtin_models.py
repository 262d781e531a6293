"""The real built-in models: prepared in a fresh cache, loaded by transformers, compared in what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.builtin_models import BUILTIN, resolve_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("name", "layers"), [("smollm2-135m-instruct", 30), ("smollm2-pruned-20", 20)])
def test_builtin_model_loads_without_complaints(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, layers: int
) -> None:
    monkeypatch.setenv("OPD_CACHE", str(cache))
    folder = resolve_model(f"builtin:{name}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, complaints = loaded
    assert not any(complaints.values()), complaints
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == len(model.model.layers) == len(BUILTIN[name].layers_kept) == layers
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 2


def test_teacher_answers_and_student_is_cut_from_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_CACHE", str(cache))
    teacher_folder = resolve_model("builtin:smollm2-135m-instruct")
    student_folder = resolve_model("builtin:smollm2-pruned-20")
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    assert AutoTokenizer.from_pretrained(student_folder).get_vocab() == tokenizer.get_vocab()
    teacher: Any = AutoModelForCausalLM.from_pretrained(teacher_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = teacher.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    assert tokenizer.decode(answer).endswith("2 + 3 = 5<|im_end|>")
    whole, cut = (load_file(folder / "model.safetensors") for folder in (teacher_folder, student_folder))
    for new, old in enumerate(BUILTIN["smollm2-pruned-20"].layers_kept):
        assert torch.equal(
            cut[f"model.layers.{new}.mlp.up_proj.weight"], whole[f"model.layers.{old}.mlp.up_proj.weight"]
        )
