"""A plan as text for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opd.estimates import size_text

if TYPE_CHECKING:
    from opd.config import GkdObjective
    from opd.plan import ModelFacts, Plan

WIDTH = 100
_LABEL_WIDTH = 14

Row = tuple[str, str]


def describe(plan: Plan) -> str:
    """Give the plan in sections of labelled lines, at most `WIDTH` columns wide."""
    sections = {
        "Models": _models(plan),
        "Data": _data(plan),
        "Training": _training(plan),
        "Machine": _machine(plan),
    }
    lines = [f"Plan of run {plan.config.name!r}: {_kind(plan)}"]
    for title, rows in sections.items():
        lines += ["", title]
        for label, text in rows:
            lines += _wrapped(f"  {label:<{_LABEL_WIDTH}}", text)
    if plan.warnings:
        lines += ["", "Warnings"]
        for warning in plan.warnings:
            lines += _wrapped("  ! ", warning)
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    hanging = " " * len(start)
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False
    )


def _kind(plan: Plan) -> str:
    rollout = plan.config.rollout
    if rollout is None:
        return "off-policy, from the data set's own answers; no rollouts, no weight sync"
    if rollout.on_policy_fraction < 1:
        return f"mixed, {rollout.on_policy_fraction:.0%} of the answers from the student, the others from the data set"
    return "on-policy, from the student's own answers"


def _models(plan: Plan) -> Sequence[Row]:
    rows = [("student", _model(plan.student)), ("", str(plan.student.folder))]
    for teacher, model in zip(plan.config.teachers, plan.teachers, strict=True):
        label = "teacher" if len(plan.teachers) == 1 else f"teacher {teacher.name}"
        rows += [(label, _model(model)), ("", str(model.folder))]
    padding = plan.vocab_size - plan.num_token_ids
    rows.append(
        (
            "vocabulary",
            f"{plan.num_token_ids:,} ids, the same tokens for all" + (f"; {padding} padding" * (padding > 0)),
        )
    )
    ends = plan.end_tokens
    names = [_token(plan, i) for i in (ends.turn_end, *sorted(ends.all - {ends.turn_end}))]
    also = f"; {', '.join(names[1:])} would end one too" if names[1:] else ""
    rows.append(("answers end", f"in {names[0]}{also}"))
    return rows


def _model(model: ModelFacts) -> str:
    text = model.config.get_text_config()
    window = "no window" if model.window is None else f"window {model.window:,}"
    return (
        f"{model.name}: {_count(model.parameters)} parameters, {model.config.model_type}, "
        f"{text.num_hidden_layers} layers, {window}"
    )


def _token(plan: Plan, token_id: int) -> str:
    return f"{plan.tokenizer.convert_ids_to_tokens(token_id)} (id {token_id})"


def _data(plan: Plan) -> Sequence[Row]:
    config, data, tokens = plan.config.data, plan.data, plan.tokens
    source = config.source + (f", held-out rows from {config.heldout_source}" if config.heldout_source else "")
    rows = [
        ("source", source),
        (
            "rows",
            f"{data.refused.rows_read:,} read: {len(data.train):,} to train on, {len(data.heldout):,} held out, "
            f"{len(data.refused.rows):,} not used",
        ),
    ]
    rows += [("", f"{count:,} not used: {reason}") for reason, count in data.refused.counts.items()]
    cut = f", {tokens.cut_off:,} cut off" if tokens.cut_off else ""
    responses = f"{tokens.mean_response:.0f} tokens on average, {tokens.longest_response:,} the longest{cut}"
    if config.response_column is None:
        responses = "none: the student answers"
    rows += [
        ("prompt", f"{tokens.mean_prompt:.0f} tokens on average, {tokens.longest_prompt:,} the longest"),
        ("response", responses),
        ("longest", f"{tokens.longest_sample:,} tokens, prompt and response together; {_window(plan)}"),
    ]
    return rows


def _window(plan: Plan) -> str:
    return "the models set no limit" if plan.window is None else f"the models take {plan.window:,}"


def _objective(objective: GkdObjective) -> str:
    if not objective.kd_weight:
        return f"{objective.ce_weight:g} x cross-entropy alone; the teacher only measures"
    weight = f"{objective.kd_weight:g} x " if objective.kd_weight != 1 else ""
    cross = f", plus {objective.ce_weight:g} x cross-entropy" if objective.ce_weight else ""
    return (
        f"{weight}divergence with beta {objective.beta:g}, temperature {objective.temperature:g}, "
        f"top {objective.top_k} ids, tail={objective.tail}{cross}"
    )


def _training(plan: Plan) -> Sequence[Row]:
    run, learner, objective = plan.config.run, plan.config.learner, plan.config.objective
    steps = f"{plan.num_steps:,} steps of {run.samples_per_step} samples"
    per_step = f"{plan.tokens.trained_per_step:,.0f}"
    rate = f"{learner.lr:g}, {learner.schedule}" + (
        f", after {learner.warmup_steps} warm-up steps" * (learner.warmup_steps > 0)
    )
    evaluated = f"every {run.eval_every} steps, first and last" if run.eval_every else "first and last step"
    saved = f"every {run.save_every} steps and at the end" if run.save_every else "at the end"
    rows = [
        ("length", f"{steps} = {plan.epochs:.2f} epochs, about {_count(plan.tokens.total)} tokens in all"),
        ("per step", f"{'about' if plan.config.rollout is None else 'at most'} {per_step} trained tokens"),
        ("objective", _objective(objective)),
        ("learning rate", rate),
    ]
    rollout, sync = plan.config.rollout, plan.config.weight_sync
    if rollout is not None and sync is not None:
        rows += [
            (
                "answers",
                f"{rollout.samples_per_prompt} to a prompt, up to {rollout.max_new_tokens} tokens, "
                f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}; "
                f"at most {_plural(rollout.max_staleness, 'step')} old",
            ),
            (
                "weight sync",
                f"every {_plural(sync.every_steps, 'step')}, {sync.transport}, buckets of {sync.bucket_mib} MiB",
            ),
        ]
    if plan.data.heldout:
        rows.append(("evaluation", f"{evaluated}, on {len(plan.data.heldout)} held-out rows"))
    rows.append(("checkpoints", f"{saved}; the last {run.keep_last} and the best are kept"))
    return rows


def _machine(plan: Plan) -> Sequence[Row]:
    config, estimates = plan.config, plan.estimates
    ranks = config.learner.data_parallel
    engines = sum(t.num_engines for t in config.teachers)
    users = f"{_plural(ranks, 'learner rank')} and {_plural(engines, 'teacher engine')}"
    if config.rollout is not None:
        users = f"{_plural(config.rollout.num_engines, 'rollout engine')}, {users}"
    learner = estimates.learner
    rows = [
        ("devices", f"{_plural(plan.host.num_gpus, 'GPU')} for {users}")
        if plan.host.has_gpus
        else ("devices", f"{_plural(plan.host.num_cpus, 'CPU core')}, shared by {users}"),
        (
            "learner",
            f"{size_text(learner.total)} a rank: weights {size_text(learner.weights)}, "
            f"gradients {size_text(learner.gradients)}, optimizer {size_text(learner.optimizer)}, "
            f"activations about {size_text(learner.activations)}",
        ),
    ]
    if config.rollout is not None and estimates.rollout is not None:
        engine = estimates.rollout
        cache = f", KV cache {size_text(engine.kv_cache)}" if engine.kv_cache else ""
        rows.append(("rollout", f"{size_text(engine.total)} an engine: weights {size_text(engine.weights)}{cache}"))
    for teacher, engine in zip(config.teachers, estimates.engines, strict=True):
        parts = {"weights": engine.weights, "KV cache": engine.kv_cache, "lm_head": engine.head}
        listed = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
        spread = f" over {teacher.tensor_parallel} GPUs" if plan.host.has_gpus and teacher.tensor_parallel > 1 else ""
        rows.append(("teacher", f"{size_text(engine.total)} an engine{spread}: {listed}"))
    rows += [
        (
            "memory",
            f"about {size_text(estimates.total_memory)} of this machine's {size_text(estimates.machine_memory)}, "
            f"{size_text(estimates.free_memory)} free now",
        ),
        (
            "disk",
            f"{estimates.checkpoints_kept} x {size_text(estimates.checkpoint)} for checkpoints in {config.output_dir}, "
            f"{size_text(estimates.free_disk)} free",
        ),
    ]
    return rows


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _count(number: int) -> str:
    """Give a large number in short: 134.5 M."""
    for unit, name in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)
