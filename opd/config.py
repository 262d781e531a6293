"""Every setting of a run, with its range and one line of help. Imports nothing heavy.

A recipe builds a `RunConfig`; `python -m opd.run --list-keys` prints this page as a table; `--set` changes single keys.
All configs are frozen and checked when made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["fp32", "bf16"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


class Config(BaseModel):
    """Frozen, refuses unknown keys, and converts no types but int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class StudentConfig(Config):
    """The model that is trained."""

    model: str = Field(description="HF folder, hub id, or builtin:NAME")
    revision: str | None = Field(default=None, description="hub revision")


class TeacherConfig(Config):
    """The model that is imitated, served by vLLM engines."""

    name: str = Field(default="teacher", pattern=r"^[A-Za-z0-9_.-]+$", description="name in metrics and messages")
    model: str = Field(description="HF folder, hub id, or builtin:NAME")
    revision: str | None = Field(default=None, description="hub revision")
    dtype: Dtype = Field(default="bf16", description="the engines' compute type")
    num_engines: Positive = Field(default=1, description="vLLM engines; samples go to the least loaded")
    tensor_parallel: Positive = Field(default=1, description="GPUs (or CPU worker processes) of one engine")
    scoring: Literal["hidden_states", "prompt_logprobs"] = Field(
        default="hidden_states",
        description="hidden_states: project the response rows only (faster); prompt_logprobs: vLLM's own top-K",
    )
    max_batched_tokens: Positive = Field(default=2048, description="tokens that an engine prefills at once")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.85, description="GPU: share vLLM may take"
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(default=0.5, description="CPU: GiB of KV cache of one engine")
    start_timeout_s: Seconds = Field(default=600.0, description="longest wait for an engine to load")
    score_timeout_s: Seconds = Field(default=300.0, description="longest wait for one request to an engine")
    max_restarts: NonNegative = Field(default=3, description="restarts of lost engines in a run before it stops")


class RolloutConfig(Config):
    """The student's own answers, written by vLLM engines."""

    on_policy_fraction: Share = Field(
        default=1.0, description="probability, drawn per sample, that the student answers; else the data set's answer"
    )
    max_staleness: NonNegative = Field(
        default=0, description="optimiser steps an answer may lag behind; 0: answers and learning take turns"
    )
    samples_per_prompt: Positive = Field(default=1, description="answers to each prompt of a step")
    temperature: Annotated[float, Field(gt=0, le=2)] = Field(default=1.0, description="of sampling")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="nucleus; 1: off")
    top_k: NonNegative = Field(default=0, description="likeliest ids to sample from; 0: all")
    min_p: Share = Field(default=0.0, description="least probability, as a share of the likeliest id's; 0: off")
    max_new_tokens: Positive = Field(default=256, description="longest answer, end token included")
    truncated_answers: Literal["train", "mask"] = Field(
        default="train", description="answers cut off at max_new_tokens: train on them, or on none of their tokens"
    )
    heldout_answers: NonNegative = Field(
        default=32, description="held-out prompts answered at each evaluation; 0: none"
    )
    heldout_temperature: Annotated[float, Field(ge=0, le=2)] = Field(
        default=0.0, description="of those answers; 0: the likeliest id"
    )
    num_engines: Positive = Field(default=1, description="vLLM engines; prompts go to the least loaded")
    tensor_parallel: Positive = Field(default=1, description="GPUs (or CPU worker processes) of one engine")
    max_running: Positive = Field(default=256, description="answers that one engine writes at the same time")
    max_batched_tokens: Positive = Field(default=2048, description="tokens that an engine computes at once")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.85, description="GPU: share vLLM may take"
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(default=0.5, description="CPU: GiB of KV cache of one engine")
    poll_s: Seconds = Field(default=0.25, description="an engine tells at least so often which answers are finished")
    start_timeout_s: Seconds = Field(default=600.0, description="longest wait for an engine to load")
    answer_timeout_s: Seconds = Field(default=120.0, description="longest wait for a sign of life while answering")
    max_restarts: NonNegative = Field(default=3, description="restarts of lost engines in a run before it stops")


class WeightSyncConfig(Config):
    """How the learner's weights reach the rollout engines."""

    every_steps: Positive = Field(default=1, description="optimiser steps between syncs")
    transport: Literal["auto", "shared_memory", "gloo", "nccl"] = Field(
        default="auto", description="auto: nccl with GPUs, else shared_memory on one host and gloo between hosts"
    )
    bucket_mib: Positive = Field(default=64, description="MiB sent at a time; each side holds two")
    timeout_s: Seconds = Field(default=120.0, description="longest wait for the other side")
    parity_every: NonNegative = Field(
        default=10,
        description="steps between comparisons of engine and learner log-probs; 0: in the first and the last sync only",
    )
    parity_tolerance: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="largest mean gap in nats before the run stops; unset: 0.15 in bf16, 0.001 in fp32"
    )


class DataConfig(Config):
    """Prompts and reference answers."""

    source: str = Field(description="file, folder or glob (.jsonl .json .csv .parquet), hub:NAME, reasoning_gym:TASK")
    split: str = Field(default="train", description="hub: which split")
    subset: str | None = Field(default=None, description="hub: which subset (configuration)")
    task_options: dict[str, Any] = Field(default={}, description="reasoning_gym: options of the task")
    task_rows: Positive = Field(default=1000, description="reasoning_gym: rows to generate")
    max_rows: Positive | None = Field(default=None, description="read only the first rows")
    heldout_source: str | None = Field(default=None, description="like source; unset: rows are set aside from source")
    heldout_rows: NonNegative = Field(default=32, description="rows to evaluate on, never trained on; 0: no evaluation")
    prompt_column: str = Field(
        default="question", description="column with the question; dots reach into nested columns"
    )
    response_column: str | None = Field(
        default="answer",
        description="column with the reference answer; none: there is none, the student answers",
    )
    messages_column: str | None = Field(
        default=None,
        description="column with chat messages, instead of the two; they end in the answer where there is one",
    )
    system_prompt: str | None = Field(default=None, description="system message put before rows that have none")
    system_role: Literal["template", "merge"] = Field(
        default="template",
        description="merge: system text goes to the front of the first user turn, for templates without it",
    )
    answer_processor: Literal["none", "gsm8k"] = Field(default="none", description="gsm8k: takes calculator marks out")
    chat_template_options: dict[str, Any] = Field(
        default={}, description="passed to the chat template, as enable_thinking"
    )
    control_text: Literal["split", "refuse"] = Field(
        default="split", description="text that spells a control token: split it into plain tokens, or refuse the row"
    )
    grader: Literal["none", "gsm8k", "math_verify", "reasoning_gym"] = Field(
        default="none", description="what judges the student's answers to held-out prompts"
    )
    max_prompt_tokens: Positive = Field(default=512, description="longer prompts are refused")
    max_response_tokens: Positive = Field(default=512, description="longest response, end token included")
    overlong_response: Literal["refuse", "truncate"] = Field(
        default="refuse", description="truncate: keep the first tokens, train no end token"
    )
    max_refused_share: Share = Field(default=0.01, description="share of rows that may be refused before the run stops")
    shuffle: bool = Field(default=True, description="seeded order, new in every epoch; false: file order")


class GkdObjective(Config):
    """Generalised knowledge distillation: see docs/objectives.md."""

    beta: Share = Field(default=0.5, description="0: forward KL(T||S); 1: reverse KL(S||T); between: generalised JSD")
    temperature: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="of both sides; not 1 needs tail=renormalize"
    )
    top_k: Positive = Field(default=64, description="teacher ids kept per position")
    tail: Literal["bucket", "renormalize"] = Field(
        default="bucket", description="the mass outside the top K: one more class, or dropped and the rest rescaled"
    )
    kd_weight: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="weight of the divergence; 0: cross-entropy alone, the teacher only measures"
    )
    ce_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="weight of cross-entropy on data set answers"
    )

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not self.kd_weight and not self.ce_weight:
            raise ValueError("kd_weight and ce_weight are both 0, so nothing would be learned; raise one of them")
        return self

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.temperature != 1.0 and self.tail == "bucket":
            raise ValueError(
                f"temperature is {self.temperature} but the tail bucket is exact only at 1, since the engine gives "
                'log-probabilities at temperature 1; use tail="renormalize" or temperature=1'
            )
        return self


class LearnerConfig(Config):
    """The Megatron-core learner."""

    dtype: Dtype = Field(
        default="bf16", description="compute type; master weights and Adam state are fp32 in both cases"
    )
    lr: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="peak learning rate")
    min_lr: Annotated[float, Field(ge=0)] = Field(default=0.0, description="what the schedule decays to")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="cosine", description="decay after the warm-up")
    warmup_steps: NonNegative = Field(default=0, description="steps of linear rise from 0")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.0, description="decoupled, on matrices only")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Adam's first-moment decay")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="Adam's second-moment decay")
    adam_eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="Adam's epsilon")
    clip_grad_norm: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="largest gradient norm; 0: no clipping"
    )
    data_parallel: Positive = Field(default=1, description="learner ranks, each with a copy of the student")
    distributed_optimizer: bool = Field(default=False, description="split Adam's state over the data-parallel ranks")
    max_tokens_per_microbatch: Positive = Field(default=2048, description="samples are packed up to this many tokens")
    recompute: bool = Field(default=False, description="recompute activations in the backward pass: slower, smaller")
    loss_chunk_tokens: Positive = Field(default=256, description="tokens whose logits exist at the same time")
    threads: NonNegative = Field(default=0, description="CPU threads of one rank; 0: shared out evenly")
    start_timeout_s: Seconds = Field(default=600.0, description="longest wait for a rank to load")
    step_timeout_s: Seconds = Field(default=1800.0, description="longest wait for a rank in one step")


class LoopConfig(Config):
    """Steps, evaluation, checkpoints."""

    max_steps: Positive = Field(description="optimiser steps")
    samples_per_step: Positive = Field(default=16, description="samples of one optimiser step, over all ranks")
    max_epochs: Positive | None = Field(default=None, description="stop after this many passes, even before max_steps")
    seed: int = Field(default=0, description="of data order")
    prefetch_steps: NonNegative = Field(default=1, description="coming steps that are scored while the learner learns")
    eval_every: NonNegative = Field(
        default=10, description="steps between held-out evaluations; 0: first and last only"
    )
    save_every: NonNegative = Field(default=0, description="steps between checkpoints; 0: at the end only")
    keep_last: Positive = Field(default=2, description="newest checkpoints kept, besides the best by held-out KL")
    text_samples: NonNegative = Field(default=2, description="trained samples shown in TensorBoard at each evaluation")


class RunConfig(Config):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="the run folder's name")
    output_dir: Path = Field(default=Path("runs"), description="where run folders are made", strict=False)
    student: StudentConfig
    teachers: list[TeacherConfig] = Field(min_length=1, max_length=1)
    data: DataConfig
    rollout: RolloutConfig | None = Field(default=None, description="unset: answers come from the data set")
    weight_sync: WeightSyncConfig | None = Field(default=None, description="set where rollout is")
    objective: GkdObjective = GkdObjective()
    learner: LearnerConfig = LearnerConfig()
    run: LoopConfig

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        response, field = self.data.max_response_tokens, "data.max_response_tokens"
        if self.rollout is not None and self.rollout.max_new_tokens > response:
            response, field = self.rollout.max_new_tokens, "rollout.max_new_tokens"
        longest = self.data.max_prompt_tokens + response
        if longest > self.learner.max_tokens_per_microbatch:
            raise ValueError(
                f"learner.max_tokens_per_microbatch is {self.learner.max_tokens_per_microbatch} but a sample may have "
                f"{longest} tokens (data.max_prompt_tokens + {field}); raise it or lower those"
            )
        if self.run.samples_per_step < self.learner.data_parallel:
            raise ValueError(
                f"run.samples_per_step is {self.run.samples_per_step}, fewer than learner.data_parallel "
                f"{self.learner.data_parallel}; every rank needs a sample"
            )
        if self.learner.warmup_steps >= self.run.max_steps:
            raise ValueError(
                f"learner.warmup_steps is {self.learner.warmup_steps}, not below run.max_steps {self.run.max_steps}; "
                "lower it too"
            )
        if self.learner.min_lr > self.learner.lr:
            raise ValueError(f"learner.min_lr {self.learner.min_lr} is above learner.lr {self.learner.lr}")
        return self

    @model_validator(mode="after")
    def _check_rollout(self) -> Self:
        rollout, sync = self.rollout, self.weight_sync
        if (rollout is None) != (sync is None):
            given, missing = ("weight_sync", "rollout") if rollout is None else ("rollout", "weight_sync")
            raise ValueError(f"{given} is set but {missing} is not; set both (on-policy) or neither (off-policy)")
        if self.data.response_column is None and (rollout is None or rollout.on_policy_fraction < 1):
            raise ValueError(
                "data.response_column is none, so the student must write all answers, but it does not; "
                "name the column, or choose a recipe with rollout.on_policy_fraction=1"
            )
        if rollout is None or sync is None:
            return self
        if not self.objective.kd_weight and rollout.on_policy_fraction > 0:
            raise ValueError(
                "objective.kd_weight is 0, and cross-entropy is learned from data set answers alone, so the student's "
                "own answers would teach nothing; raise it, or set rollout.on_policy_fraction=0"
            )
        if sync.every_steps > rollout.max_staleness + 1:
            raise ValueError(
                f"weight_sync.every_steps is {sync.every_steps}, so answers lag {sync.every_steps - 1} steps behind, "
                f"more than rollout.max_staleness {rollout.max_staleness} allows; raise that or sync more often"
            )
        if self.run.samples_per_step % rollout.samples_per_prompt:
            raise ValueError(
                f"run.samples_per_step is {self.run.samples_per_step}, not a multiple of rollout.samples_per_prompt "
                f"{rollout.samples_per_prompt}"
            )
        if rollout.samples_per_prompt > 1 and rollout.on_policy_fraction < 1:
            raise ValueError(
                f"rollout.samples_per_prompt is {rollout.samples_per_prompt}, but a data set has one answer to a "
                "prompt; use 1, or on_policy_fraction=1"
            )
        return self
