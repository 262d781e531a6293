"""The part of vLLM that all engines use: ids in, outputs out; and the lm_head of those that sample or score with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from vllm import EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams, TokensPrompt

from opd.config import Dtype
from opd.device import HostProfile
from opd.matmul import set_fp32_precision

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)

VLLM_DTYPE: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16"}


class HeadSettings:
    """What vLLM mixes into its workers, so that the lm_head can be set up where it lives."""

    model_runner: Any
    """Of the worker; only declared here, since vLLM refuses a mixin with an attribute that the worker has too."""

    def set_up_head(self, vocab_size: int, matmul_precision: str) -> None:
        """Cut the logits to the ids that count; let oneDNN round operands of the fp32 lm_head."""
        self.model_runner.model.logits_processor.org_vocab_size = vocab_size
        set_fp32_precision(matmul_precision)

    def set_up_sampler(self, vocab_size: int, num_token_ids: int) -> None:
        """Tell the sampler how wide the cut logits are, since it writes "no top-k" as that number.

        Ids from `num_token_ids` on are never sampled, though log-probabilities count them, as the learner's do.
        """
        self.model_runner.input_batch.vocab_size = vocab_size
        sampler = self.model_runner.sampler
        process = sampler.apply_logits_processors

        def only_tokens(logits: torch.Tensor, *args: object) -> torch.Tensor:
            processed = process(logits, *args)
            processed[:, num_token_ids:] = -torch.inf
            return processed

        if num_token_ids < vocab_size:
            sampler.apply_logits_processors = only_tokens

    def keep_fp32_head(self) -> None:
        """Keep the lm_head in fp32, for a CPU, where vLLM converts all of it at every step; again after new weights.

        A step of 16 answers with 49 k ids of width 576 spends 10 ms in the lm_head instead of 52 on two cores.
        """
        model = self.model_runner.model
        weight = model.lm_head.weight.detach().float()

        def apply_head(_: torch.nn.Module, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return torch.nn.functional.linear(hidden.float(), weight, None if bias is None else bias.float())

        model.logits_processor._apply_head = apply_head


HEAD_ARGS: Mapping[str, Any] = {
    "logprobs_mode": "raw_logprobs",
    "hf_overrides": {"head_dtype": "float32"},  # bf16 logits lose up to 6 % of the loss
    "worker_extension_cls": f"{HeadSettings.__module__}.{HeadSettings.__qualname__}",
}
"""Arguments of vLLM that `VllmEngine.set_up_head` needs."""


class VllmEngine:
    """vLLM's engine without its front end, which wants a tokenizer and a chat template."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        self._folder = engine_args["model"]
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        except ValidationError as error:  # it cannot be pickled, and would show every setting
            problems = "; ".join(problem["msg"] for problem in error.errors(include_input=False))
            raise ValueError(
                f"vLLM refuses {self._folder}: {problems} (max_model_len is what the longest prompt and response "
                "need: data.max_prompt_tokens, data.max_response_tokens, rollout.max_new_tokens)"
            ) from None
        self._requests_sent = 0

    def set_up_head(self, vocab_size: int, *, dtype: Dtype, profile: HostProfile) -> None:
        """Give probability to the first `vocab_size` ids only, in fp32; needs `HEAD_ARGS`.

        Raises:
            ValueError: The model has fewer ids.
        """
        model_ids = self._engine.model_config.get_vocab_size()
        if vocab_size > model_ids:
            raise ValueError(f"the model in {self._folder} has {model_ids} ids, fewer than the {vocab_size} that count")
        # The operands came from bf16, so rounding them to it again is exact.
        rounds = dtype == "bf16" and profile.bf16_products == "upcast"
        self.call_workers("set_up_head", vocab_size, "bf16" if rounds else "ieee")

    def call_workers(self, method: str, *args: object) -> None:
        """Call a method of every worker."""
        self._engine.collective_rpc(method, args=args)

    def add(self, name: str, ids: NDArray[np.int32], params: SamplingParams | PoolingParams) -> None:
        """Take in a request; `name` must not be in use."""
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=ids.tolist()), params)

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests."""
        self._engine.abort_request(list(names))

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self._engine.has_unfinished_requests()

    def step(self, kind: type[Output]) -> list[Output]:
        """Compute once; give what is new of the requests, of the `kind` that their params lead to."""
        outputs: list[Output] = []
        for output in self._engine.step():
            assert isinstance(output, kind)
            outputs.append(output)
        return outputs

    def run(
        self, prompts: Sequence[NDArray[np.int32]], params: SamplingParams | PoolingParams, kind: type[Output]
    ) -> list[Output]:
        """Give one output of the `kind` that `params` lead to for each prompt, in order."""
        names = [str(number) for number in range(self._requests_sent, self._requests_sent + len(prompts))]
        self._requests_sent += len(prompts)
        for name, ids in zip(names, prompts, strict=True):
            self.add(name, ids, params)
        outputs: dict[str, Output] = {}
        while self.has_unfinished():
            outputs |= {output.request_id: output for output in self.step(kind) if output.finished}
        return [outputs[name] for name in names]

    def forget_prefixes(self) -> None:
        """Drop all cached keys and values; requests under way are computed anew and go on."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM could not drop its prefix cache, which holds values of the old weights")

    def close(self) -> None:
        """End vLLM's own processes, which leave shared memory behind when they are killed."""
        self._engine.engine_core.shutdown()
