"""The part of vLLM that both ways of scoring use: ids in, finished outputs out, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from vllm import EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams, TokensPrompt

from opd.score.requests import ScoreRequest

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class VllmEngine:
    """vLLM's engine without its front end, which wants a tokenizer and a chat template."""

    def __init__(self, engine_args: Mapping[str, Any]) -> None:
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        except ValidationError as error:  # it cannot be pickled, and would show every setting
            problems = "; ".join(problem["msg"] for problem in error.errors(include_input=False))
            raise ValueError(
                f"vLLM refuses {engine_args['model']}: {problems} (max_model_len is what the longest prompt and "
                "response need: data.max_prompt_tokens, data.max_response_tokens)"
            ) from None
        self._requests_sent = 0

    @property
    def vocab_size(self) -> int:
        """Ids of the model, padding included."""
        return self._engine.model_config.get_vocab_size()

    def call_workers(self, method: str, *args: object) -> None:
        """Call a method of every worker."""
        self._engine.collective_rpc(method, args=args)

    def run(
        self, requests: Sequence[ScoreRequest], params: SamplingParams | PoolingParams, kind: type[Output]
    ) -> list[Output]:
        """Give one output of the `kind` that `params` lead to for each request, in order."""
        names = [str(number) for number in range(self._requests_sent, self._requests_sent + len(requests))]
        self._requests_sent += len(requests)
        for name, request in zip(names, requests, strict=True):
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=request.ids.tolist()), params)
        outputs: dict[str, Output] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, kind)
                if output.finished:
                    outputs[output.request_id] = output
        return [outputs[name] for name in names]

    def close(self) -> None:
        """End vLLM's own processes, which leave shared memory behind when they are killed."""
        self._engine.engine_core.shutdown()
