"""One teacher engine: the class that runs as a Ray actor. vLLM and torch are imported in the actor only."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opd.config import TeacherConfig
from opd.device import HostProfile
from opd.engine_pool import EngineInfo
from opd.score.requests import EngineReply, ScoreRequest

if TYPE_CHECKING:
    from opd.score.vllm_hidden import HiddenStateScorer
    from opd.score.vllm_prompt import PromptLogprobScorer


class TeacherEngine:
    """A teacher in vLLM, scoring finished responses; ids in, ids out.

    Args:
        config: Of the teacher.
        folder: HF folder of its weights, on this host.
        top_k: Ids kept per position; the vocabulary size keeps all.
        vocab_size: Ids that count: the tokenizer's. Embedding rows beyond it are padding and get no probability.
        longest: Tokens of the longest sequence to score.
        profile: Of this host.
    """

    def __init__(
        self, config: TeacherConfig, folder: str, top_k: int, vocab_size: int, longest: int, profile: HostProfile
    ) -> None:
        self._config = config
        self._folder = folder
        self._top_k = top_k
        self._vocab_size = vocab_size
        self._longest = longest
        self._profile = profile
        self._scorer: HiddenStateScorer | PromptLogprobScorer | None = None

    def ready(self) -> EngineInfo:
        """Load the teacher and say what it can do; called once, before `score`."""
        started = time.monotonic()
        sizes: dict[str, Any] = {
            "top_k": self._top_k,
            "vocab_size": self._vocab_size,
            "dtype": self._config.dtype,
            "profile": self._profile,
        }
        if self._config.scoring == "hidden_states":
            from opd.score.vllm_hidden import HiddenStateScorer

            self._scorer = HiddenStateScorer(self._engine_args(spare=0), **sizes)
        else:
            from opd.score.vllm_prompt import PromptLogprobScorer

            self._scorer = PromptLogprobScorer(self._engine_args(spare=1), **sizes)
        return EngineInfo(
            pid=os.getpid(),
            window=self._longest,
            vocab_size=self._vocab_size,
            load_s=time.monotonic() - started,
        )

    def score(self, requests: Sequence[ScoreRequest]) -> EngineReply:
        """Score sequences, in order."""
        assert self._scorer is not None, "ready() comes first"
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answers = self._scorer.score(requests)
        except EngineDeadError:
            # vLLM's own processes are gone for good: end as well, so that the pool starts another engine.
            traceback.print_exc()
            os._exit(1)
        return EngineReply(answers=answers, memory_gib=self.memory_gib())

    def close(self) -> None:
        """End vLLM's own processes; the actor can be killed after it."""
        if self._scorer is not None:
            self._scorer.close()

    def memory_gib(self) -> float:
        """Give the peak resident set, or the device memory in use."""
        return self._profile.peak_memory_gib()

    def _engine_args(self, *, spare: int) -> dict[str, Any]:
        """Give the arguments of vLLM that both ways of scoring share."""
        from opd.vllm_engine import VLLM_DTYPE

        config = self._config
        return {
            "model": self._folder,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # nothing from the model's generation_config.json
            "dtype": VLLM_DTYPE[config.dtype],
            "tensor_parallel_size": config.tensor_parallel,
            "max_model_len": self._longest + spare,
            "max_num_batched_tokens": config.max_batched_tokens,
            "max_num_seqs": min(256, config.max_batched_tokens),
            "enable_chunked_prefill": True,
            # A cached prefix has no scores of its own, and every position is wanted.
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
            **self._profile.engine_kwargs(
                kv_cache_gib=config.kv_cache_gib, gpu_memory_utilization=config.gpu_memory_utilization
            ),
        }
