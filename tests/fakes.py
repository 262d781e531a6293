"""Small stand-ins for the real parts: quick to make, with nothing to download."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_WITH_BOS = "{{ bos_token }}" + CHATML
CHATML_WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
CHATML_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
"""Strips reasoning from past turns; an empty think block when `enable_thinking` is false."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
"""Ids 0 to 3."""
ENDOFTEXT, IM_START, IM_END, BOS = range(4)
PLAIN_TOKENS = ("<think>", "</think>")
"""Added tokens that are not special; their ids are the last."""


def byte_tokenizer(
    chat_template: str | None = CHATML,
    *,
    eos_token: str = "<|im_end|>",
    adds_bos: bool = False,
    extra_special: Sequence[AddedToken] = (),
) -> PreTrainedTokenizerFast:
    """Give a byte-level BPE tokenizer of about 300 ids, in which a few common words are one token.

    Args:
        chat_template: None for a model without one.
        eos_token: one of `SPECIAL_TOKENS`.
        adds_bos: whether its post-processor puts `<s>` before a text.
        extra_special: more special tokens, with ids after the others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        show_progress=False,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["user assistant system what does a fruit mean? banana\n\n"] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_TOKENS])
    tokenizer.add_special_tokens(list(extra_special))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, bos_token="<s>")
    wrapped.chat_template = chat_template
    return wrapped
