"""One student engine: the class that runs as a Ray actor. vLLM and torch are imported in the actor only.

    pump(new, cancel) ──► vLLM steps for poll_s ──► finished answers         receive(version) between two pumps

Everything is a short synchronous call: Ray runs these on the actor's main thread, where torch computes 1.4 times faster
on a CPU than on another one. vLLM computes within a call only, so that weights change between two steps, never in one.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.config import Dtype, RolloutConfig
from opd.device import HostProfile
from opd.engine_pool import EngineInfo
from opd.rollout.requests import Answer, PumpReply, RolloutRequest

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from opd.vllm_engine import VllmEngine


@dataclass(slots=True)
class _Growing:
    """An answer under way; one entry per token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class StudentEngine:
    """The student in vLLM, answering prompts; ids in, ids out.

    Args:
        config: Of the rollouts.
        dtype: What the student computes in.
        folder: HF folder of its first weights, on this host.
        vocab_size: Ids that count, as in the learner: rows beyond it have no probability.
        end_token_ids: Any of them ends an answer.
        longest: Tokens of the longest prompt and response.
        profile: Of this host.
        seed: Of vLLM itself; every request has its own.
        weight_transfer: Whether the weights can be replaced, which needs the `opd` plug-in of vLLM.
        num_token_ids: Ids that may be sampled: the tokenizer's; those from here to `vocab_size` are padding.
    """

    def __init__(
        self,
        config: RolloutConfig,
        dtype: Dtype,
        folder: str,
        vocab_size: int,
        end_token_ids: Sequence[int],
        longest: int,
        profile: HostProfile,
        seed: int,
        weight_transfer: bool = True,
        num_token_ids: int | None = None,
    ) -> None:
        self._num_token_ids = vocab_size if num_token_ids is None else num_token_ids
        self._config, self._folder = config, folder
        self._dtype: Dtype = dtype
        self._vocab_size, self._end_token_ids, self._longest = vocab_size, list(end_token_ids), longest
        self._profile, self._seed, self._weight_transfer = profile, seed, weight_transfer
        self._loaded: VllmEngine | None = None
        self._growing: dict[str, _Growing] = {}
        self._version = 0

    def ready(self) -> EngineInfo:
        """Load the student and say what it can do; called once, before all else."""
        from opd.vllm_engine import VllmEngine

        started = time.monotonic()
        engine = self._loaded = VllmEngine(self._engine_args())
        engine.set_up_head(self._vocab_size, dtype=self._dtype, profile=self._profile)
        engine.call_workers("set_up_sampler", self._vocab_size, self._num_token_ids)
        self._weights_are_new()
        return EngineInfo(
            pid=os.getpid(),
            window=self._longest,
            vocab_size=self._vocab_size,
            load_s=time.monotonic() - started,
        )

    def pump(self, new: Sequence[RolloutRequest], cancel: Sequence[str], poll_s: float) -> PumpReply:
        """Take in requests, drop others, and compute for `poll_s` seconds, or less when nothing is left.

        Args:
            new: To be answered from now on.
            cancel: Keys of requests that nobody waits for.
            poll_s: A last step that began before is finished.
        """
        from vllm import RequestOutput
        from vllm.v1.engine.exceptions import EngineDeadError

        started = time.monotonic()
        for key in cancel:
            self._growing.pop(key, None)
        answers: list[Answer] = []
        generated = 0
        try:
            self._vllm.abort(cancel)
            for request in new:
                self._growing[request.key] = _Growing()
                self._vllm.add(request.key, request.prompt_ids, self._sampling(request))
            while self._vllm.has_unfinished():
                for output in self._vllm.step(RequestOutput):
                    generated += self._grow(output)
                    if output.finished:
                        answers.append(self._finish(output))
                if time.monotonic() - started >= poll_s:
                    break
        except EngineDeadError:
            # vLLM's own processes are gone for good: end as well, so that the pool starts another engine.
            traceback.print_exc()
            os._exit(1)
        return PumpReply(
            answers=answers,
            generated_tokens=generated,
            busy_s=time.monotonic() - started,
            memory_gib=self._profile.peak_memory_gib(),
        )

    def open_channel(self, init_info: Mapping[str, Any]) -> None:
        """Check a plan of weights against the model, and get ready to receive."""
        self._vllm.call_workers("init_weight_transfer_engine", dict(init_info))

    def receive(self, version: int, update_info: Mapping[str, Any]) -> None:
        """Take in the weights of a version; answers under way go on with them. After an error it is unusable."""
        self._vllm.call_workers("start_weight_update")
        self._vllm.call_workers("update_weights", dict(update_info))
        self._vllm.call_workers("finish_weight_update")
        self._vllm.forget_prefixes()
        self._weights_are_new()
        self._version = version

    def close(self) -> None:
        """End vLLM's own processes; the actor can be killed after it."""
        if self._loaded is not None:
            self._loaded.close()

    @property
    def _vllm(self) -> VllmEngine:
        assert self._loaded is not None, "ready() comes first"
        return self._loaded

    def _weights_are_new(self) -> None:
        if not self._profile.has_gpus:
            self._vllm.call_workers("keep_fp32_head")

    def _grow(self, output: RequestOutput) -> int:
        """Add what a step sampled for one request; give how many tokens."""
        (part,) = output.outputs
        ids, growing = part.token_ids, self._growing[output.request_id]
        assert part.logprobs is not None
        for token, row in zip(ids, part.logprobs, strict=True):
            assert row is not None
            growing.logprobs.append(row[token].logprob)
        growing.ids += ids
        growing.versions += [self._version] * len(ids)
        return len(ids)

    def _finish(self, output: RequestOutput) -> Answer:
        growing = self._growing.pop(output.request_id)
        reason = output.outputs[0].finish_reason
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {output.request_id} with {reason!r}, not with stop or length")
        return Answer(
            key=output.request_id,
            prompt_ids=np.array(output.prompt_token_ids, np.int32),
            response_ids=np.array(growing.ids, np.int32),
            sampling_logprobs=np.array(growing.logprobs, np.float32),
            weight_versions=np.array(growing.versions, np.int32),
            finish_reason="stop" if growing.ids[-1] in self._end_token_ids else "length",
        )

    def _sampling(self, request: RolloutRequest) -> SamplingParams:
        """Give every sampling value, whatever vLLM's or the model's defaults are."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=1,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            min_tokens=0,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            stop_token_ids=self._end_token_ids,
            ignore_eos=True,  # the model's own; `stop_token_ids` has all that count
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,  # each token once, so that it gets the version that sampled it
        )

    def _engine_args(self) -> dict[str, Any]:
        from opd.vllm_engine import HEAD_ARGS, VLLM_DTYPE

        config = self._config
        return {
            "model": self._folder,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # nothing from the model's generation_config.json
            "dtype": VLLM_DTYPE[self._dtype],
            "tensor_parallel_size": config.tensor_parallel,
            "max_model_len": self._longest,
            "max_num_batched_tokens": config.max_batched_tokens,
            "max_num_seqs": min(config.max_running, config.max_batched_tokens),
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            # A step must be over when its call is: with scheduling ahead, one could straddle a change of weights.
            "async_scheduling": False,
            "seed": self._seed,
            "disable_log_stats": True,
            **HEAD_ARGS,
            **({"weight_transfer_config": {"backend": "opd"}} if self._weight_transfer else {}),
            **self._profile.engine_kwargs(
                kv_cache_gib=config.kv_cache_gib, gpu_memory_utilization=config.gpu_memory_utilization
            ),
        }
