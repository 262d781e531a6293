"""The two starting points that recipes share: the embedded example for a host without GPUs, and Qwen3 on GSM8K."""

from __future__ import annotations

from dataclasses import dataclass

from opd.config import DataConfig, LearnerConfig, LoopConfig, RolloutConfig, StudentConfig, TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Models, data and sizes that go together; the recipe adds the method."""

    student: StudentConfig
    teacher: TeacherConfig
    data: DataConfig
    rollout: RolloutConfig
    """For recipes in which the student answers."""
    learner: LearnerConfig
    run: LoopConfig


def embedded() -> Preset:
    """Give the example that needs no GPU and no download: SmolLM2-135M teaches a copy of itself cut to 20 layers."""
    return Preset(
        student=StudentConfig(model="builtin:smollm2-pruned-20"),
        teacher=TeacherConfig(model="builtin:smollm2-135m-instruct"),
        data=DataConfig(
            source="reasoning_gym:gsm_symbolic",
            task_rows=1000,
            heldout_rows=32,
            prompt_column="question",
            response_column="metadata.answer_cot",
            max_prompt_tokens=256,  # the longest of 1,000 has 185
            max_response_tokens=256,  # 3 of 1,000 are longer, and refused
            grader="reasoning_gym",
        ),
        # held-out answers are sampled as the trained ones are: this student's likeliest answer mostly repeats itself
        rollout=RolloutConfig(max_new_tokens=96, heldout_answers=16, heldout_temperature=1.0, max_running=32),
        learner=LearnerConfig(lr=2e-4, schedule="cosine", warmup_steps=3, max_tokens_per_microbatch=1024),
        # no prefetch: a teacher that scores while the learner learns would take one of two cores
        run=LoopConfig(max_steps=30, samples_per_step=8, prefetch_steps=0, eval_every=10, save_every=15),
    )


def qwen3_gsm8k() -> Preset:
    """Give what users with GPUs expect: Qwen3-0.6B learns grade-school mathematics from Qwen3-8B."""
    return Preset(
        student=StudentConfig(model="Qwen/Qwen3-0.6B"),
        teacher=TeacherConfig(model="Qwen/Qwen3-8B", max_batched_tokens=8192),
        data=DataConfig(
            source="hub:openai/gsm8k",
            subset="main",
            heldout_rows=128,
            prompt_column="question",
            response_column="answer",
            answer_processor="gsm8k",
            chat_template_options={"enable_thinking": False},  # the answers hold no reasoning block
            grader="gsm8k",
        ),
        rollout=RolloutConfig(max_new_tokens=512, max_staleness=1, heldout_answers=128, max_batched_tokens=8192),
        learner=LearnerConfig(
            lr=1e-5, schedule="cosine", warmup_steps=10, max_tokens_per_microbatch=8192, loss_chunk_tokens=1024
        ),
        run=LoopConfig(max_steps=200, samples_per_step=64, eval_every=20, save_every=100),
    )
