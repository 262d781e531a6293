"""All that can be known of a run before anything is started: `--dry-run` prints it, a real run starts from it.

    config ──► devices ──► models, tokenizers, vocabulary ──► data ──► steps ──► memory and disk ──► Plan

What cannot work stops here with a `ValueError` that names the setting; what may be unwanted becomes a warning.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from opd.config import RunConfig
from opd.data.chat import EndTokens
from opd.data.dataset import PreparedData, check_enough, prepare
from opd.data.graders import Grader, make_grader
from opd.device import HostProfile
from opd.estimates import Estimates, check_disk, check_memory, estimate, kv_warnings
from opd.model_facts import ModelFacts, model_warnings, read_model, shared_window
from opd.model_support import check_supported
from opd.plan_text import describe
from opd.types import Prompt, Sample
from opd.vocabulary import check_same_tokens, shared_vocab_size, token_ids
from opd.weight_sync.sync import transport_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Sizes of the samples to train on."""

    mean_prompt: float
    mean_response: float
    longest_prompt: int
    longest_response: int
    longest_sample: int
    """Held-out samples count here too: they are scored as well."""
    cut_off: int
    """Samples whose response was truncated."""
    trained_per_step: float
    """Mean; an answer of the student counts with the most tokens that it may have."""
    total: int
    """Prompt and response tokens of all steps together, about."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A run that can be started."""

    config: RunConfig
    host: HostProfile
    student: ModelFacts
    teachers: tuple[ModelFacts, ...]
    """In the order of `config.teachers`."""
    data: PreparedData
    grader: Grader | None
    """Judges the student's answers to held-out prompts; None where the student does not answer, or nobody judges."""
    vocab_size: int
    """Ids that student and teachers are compared on: the smallest embedding height."""
    num_token_ids: int
    """Ids that the tokenizer can give; those from here to `vocab_size` are padding."""
    window: int | None
    """Tokens that prompt and response may have together: what the student takes, and the scorer with a spare one."""
    num_steps: int
    """Optimiser steps: `run.max_steps`, or fewer when `run.max_epochs` allows no more."""
    num_samples: int
    """Samples of all steps together."""
    tokens: TokenCounts
    estimates: Estimates
    warnings: tuple[str, ...]

    @property
    def student_folder(self) -> Path:
        """The student's HF folder."""
        return self.student.folder

    @property
    def student_config(self) -> PretrainedConfig:
        """The student's HF config."""
        return self.student.config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The student's, which is the teachers' too."""
        return self.student.tokenizer

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its answer that an engine may see."""
        rollout = self.config.rollout
        answered = 0 if rollout is None else self.tokens.longest_prompt + rollout.max_new_tokens
        return max(self.tokens.longest_sample, answered)

    @property
    def teacher_folders(self) -> Mapping[str, Path]:
        """Teacher's name → HF folder."""
        return {t.name: m.folder for t, m in zip(self.config.teachers, self.teachers, strict=True)}

    @property
    def end_tokens(self) -> EndTokens:
        """What ends an answer."""
        return self.data.end_tokens

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return self.num_samples / len(self.data.train)

    def describe(self) -> str:
        """Give the plan as text of at most 100 columns."""
        return describe(self)


def make_plan(config: RunConfig, host: HostProfile) -> Plan:
    """Resolve and check everything that needs no engine; prepares or downloads models where needed.

    Raises:
        ValueError: the run cannot work; the message names the setting and what to change.
    """
    warnings = _check_devices(config, host)
    _check_transport(config, host)
    student = read_model("student.model", config.student)
    check_supported(student.config)
    teachers = tuple(read_model(f"teachers.{i}.model", teacher) for i, teacher in enumerate(config.teachers))
    for teacher in teachers:
        check_same_tokens(student.tokenizer, teacher.tokenizer, teacher.where)
    num_token_ids = token_ids(student.tokenizer)
    vocab_size = shared_vocab_size(num_token_ids, {m.where: m.embedding_rows for m in (student, *teachers)})
    if config.objective.top_k > vocab_size:
        raise ValueError(f"objective.top_k is {config.objective.top_k}, but there are {vocab_size} ids; lower it")
    window = shared_window(student, teachers)
    data = prepare(
        config.data,
        student.tokenizer,
        teacher=config.teachers[0].name,
        seed=config.run.seed,
        model_folder=student.folder,
        window=window,
    )
    grader = make_grader(config.data, seed=config.run.seed) if config.rollout is not None else None
    if grader is not None:
        grader.check(data.heldout)
    num_steps, num_samples = _count_steps(config, data.train)
    tokens = _count_tokens(config, data, num_samples)
    estimates = estimate(config, host, student, teachers, num_steps)
    check_disk(config, estimates)
    warnings += check_memory(config, host, estimates)
    warnings += model_warnings(student, teachers)
    warnings += _size_warnings(config, data, window, num_steps, tokens)
    plan = Plan(
        config=config,
        host=host,
        student=student,
        teachers=teachers,
        data=data,
        grader=grader,
        vocab_size=vocab_size,
        num_token_ids=num_token_ids,
        window=window,
        num_steps=num_steps,
        num_samples=num_samples,
        tokens=tokens,
        estimates=estimates,
        warnings=(),
    )
    _check_answers_fit(plan)
    warnings += kv_warnings(config, host, student, teachers, plan.longest_sequence)
    return dataclasses.replace(plan, warnings=tuple(warnings))


def _check_answers_fit(plan: Plan) -> None:
    rollout = plan.config.rollout
    if rollout is not None and plan.window is not None and plan.longest_sequence > plan.window:
        raise ValueError(
            f"rollout.max_new_tokens is {rollout.max_new_tokens} and the longest prompt has "
            f"{plan.tokens.longest_prompt} tokens, but the models take {plan.window} together; lower it, or "
            "data.max_prompt_tokens"
        )


def _check_devices(config: RunConfig, host: HostProfile) -> list[str]:
    ranks = config.learner.data_parallel
    if not host.has_gpus:
        if ranks > host.num_cpus:
            return [f"learner.data_parallel is {ranks} on {host.num_cpus} CPU cores: the ranks will take turns"]
        return []
    parts = {"learner.data_parallel": ranks}
    parts |= {
        f"teachers.{i}.num_engines x teachers.{i}.tensor_parallel": t.num_engines * t.tensor_parallel
        for i, t in enumerate(config.teachers)
    }
    if config.rollout is not None:
        name = "rollout.num_engines x rollout.tensor_parallel"
        parts[name] = config.rollout.num_engines * config.rollout.tensor_parallel
    asked = sum(parts.values())
    terms = " + ".join(f"{count} ({name})" for name, count in parts.items())
    if asked <= host.num_gpus:
        return []
    if "RAY_ADDRESS" in os.environ:
        return [
            f"the run asks for {asked} GPUs = {terms}; this machine has {host.num_gpus}, the cluster must have more"
        ]
    raise ValueError(
        f"the run asks for {asked} GPUs = {terms}, but this machine has {host.num_gpus}; lower one of these, show "
        "more GPUs in CUDA_VISIBLE_DEVICES, or set RAY_ADDRESS to a cluster with more"
    )


def _check_transport(config: RunConfig, host: HostProfile) -> None:
    """Refuse what cannot carry weights on any number of hosts like this."""
    if config.weight_sync is None:
        return
    wanted = config.weight_sync.transport
    kind = transport_kind(wanted, has_gpus=host.has_gpus, num_hosts=1)
    if kind == "nccl" and importlib.util.find_spec("cupy") is None:
        raise ValueError(
            f"weight_sync.transport is {wanted}, which is NCCL through cupy here, but cupy is not installed; install "
            "cupy-cuda12x or cupy-cuda13x, as torch's CUDA, or use --set weight_sync.transport=shared_memory"
        )


def _count_steps(config: RunConfig, train: Sequence[Prompt | Sample]) -> tuple[int, int]:
    """Give the steps of the run, and the samples of all of them."""
    run = config.run
    allowed = check_enough(train, run.samples_per_step, run.max_epochs)
    steps = run.max_steps if allowed is None else min(run.max_steps, allowed)
    if config.learner.warmup_steps >= steps:
        raise ValueError(
            f"learner.warmup_steps is {config.learner.warmup_steps}, but run.max_epochs {run.max_epochs} over "
            f"{len(train)} samples makes only {steps} steps; lower it or allow more epochs"
        )
    samples = steps * run.samples_per_step
    return steps, samples if run.max_epochs is None else min(samples, len(train) * run.max_epochs)


def _count_tokens(config: RunConfig, data: PreparedData, num_samples: int) -> TokenCounts:
    rows = [*data.train, *data.heldout]
    answered = [row for row in data.train if isinstance(row, Sample)]
    own = config.rollout.on_policy_fraction if config.rollout is not None else 0.0
    longest_answer = config.rollout.max_new_tokens if config.rollout is not None else 0
    responses = np.array([len(s.response_ids) for s in answered] or [0])
    trained = np.array([int(s.loss_mask.sum()) for s in answered] or [0])
    mean_prompt = float(np.mean([len(row.prompt_ids) for row in data.train]))
    mean_response = (1 - own) * float(responses.mean()) + own * longest_answer
    return TokenCounts(
        mean_prompt=mean_prompt,
        mean_response=float(responses.mean()),
        longest_prompt=max(len(row.prompt_ids) for row in rows),
        longest_response=int(responses.max()),
        longest_sample=max(row.num_tokens if isinstance(row, Sample) else len(row.prompt_ids) for row in rows),
        cut_off=sum(s.finish_reason == "length" for s in answered),
        trained_per_step=((1 - own) * float(trained.mean()) + own * longest_answer) * config.run.samples_per_step,
        total=round((mean_prompt + mean_response) * num_samples),
    )


def _size_warnings(
    config: RunConfig, data: PreparedData, window: int | None, num_steps: int, tokens: TokenCounts
) -> list[str]:
    warnings = []
    longest = config.data.max_prompt_tokens + config.data.max_response_tokens
    if window is not None and longest > window:
        warnings.append(
            f"data.max_prompt_tokens + data.max_response_tokens is {longest}, but the models take {window} tokens "
            "(the teacher with one to spare): longer rows are refused or cut"
        )
    if num_steps < config.run.max_steps:
        warnings.append(
            f"run.max_epochs {config.run.max_epochs} ends the run after {num_steps} of run.max_steps "
            f"{config.run.max_steps} steps"
        )
    if tokens.cut_off * 10 > len(data.train):
        warnings.append(
            f"{tokens.cut_off} of {len(data.train)} answers are cut off and train no end token; "
            f"raise data.max_response_tokens {config.data.max_response_tokens} if the models should learn to end"
        )
    if not data.heldout:
        warnings.append("no rows are held out: nothing is evaluated and no best checkpoint is kept")
    elif len(data.heldout) < config.data.heldout_rows:
        warnings.append(
            f"{len(data.heldout)} rows are held out, fewer than data.heldout_rows {config.data.heldout_rows}"
        )
    return warnings
