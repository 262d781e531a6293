"""The plan: what it finds out, what it refuses, what it warns of, on tiny models."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from opd import estimates
from opd.config import GkdObjective, LearnerConfig, RunConfig
from opd.device import GIB, HostProfile
from opd.estimates import checkpoint_bytes, count_parameters, kv_cache_bytes, learner_memory, machine_memory
from opd.plan import Plan, make_plan
from opd.types import Sample
from tests.fakes import CHATML, CHATML_WITH_BOS, IM_END, byte_tokenizer
from tests.tiny_models import make_tiny

CPU = HostProfile.cpu(num_cpus=2)
Settings = Mapping[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `student` (512 embedding rows) and `teacher` (640), both windows 512."""
    folder = tmp_path_factory.mktemp("models")
    for name, vocab, layers in (("student", 512, 2), ("teacher", 640, 3)):
        make_tiny(folder / name, "llama", tied=True, vocab=vocab, layers=layers)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def changed(models: Path, tmp_path: Path) -> Path:
    """A copy of `models` to spoil."""
    return Path(shutil.copytree(models, tmp_path / "models"))


def make_config(models: Path, folder: Path, **sections: Settings) -> RunConfig:
    """Give a config over 40 rows, one of them without an answer."""
    rows = [{"question": f"what is {i}?", "answer": f"it is {i}" if i else None} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults: dict[str, Settings] = {
        "student": {"model": str(models / "student")},
        "data": {"source": str(folder / "rows.jsonl"), "heldout_rows": 7, "max_refused_share": 0.1}
        | {"max_prompt_tokens": 200, "max_response_tokens": 200},
        "run": {"max_steps": 10, "samples_per_step": 8},
        "learner": {},
        "objective": {},
        "teacher": {"model": str(models / "teacher"), "kv_cache_gib": 0.01},
    }
    merged = {name: {**settings, **sections.get(name, {})} for name, settings in defaults.items()}
    teacher = merged.pop("teacher")
    return RunConfig.model_validate({"name": "tiny", "output_dir": folder / "runs", "teachers": [teacher], **merged})


def plan_of(models: Path, folder: Path, host: HostProfile = CPU, **sections: Settings) -> Plan:
    return make_plan(make_config(models, folder, **sections), host)


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_plan_holds_what_a_run_needs(models: Path, tmp_path: Path) -> None:
    plan = plan_of(models, tmp_path)
    tokenizer = byte_tokenizer()
    assert plan.student_folder == models / "student"
    assert plan.teacher_folders == {"teacher": models / "teacher"}
    assert plan.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert plan.student_config.num_hidden_layers == 2
    assert (plan.vocab_size, plan.num_token_ids) == (512, len(tokenizer))
    assert plan.window == 511
    assert plan.end_tokens.turn_end == IM_END
    assert (len(plan.data.train), len(plan.data.heldout)) == (32, 7)
    assert (plan.num_steps, plan.num_samples, plan.epochs) == (10, 80, 2.5)
    assert plan.warnings == ()


def test_the_token_counts_are_those_of_the_samples(models: Path, tmp_path: Path) -> None:
    plan = plan_of(models, tmp_path)
    samples = [row for row in plan.data.train if isinstance(row, Sample)]
    responses = [len(s.response_ids) for s in samples]
    assert plan.tokens.mean_response == pytest.approx(sum(responses) / 32)
    assert plan.tokens.longest_response == max(responses)
    assert plan.tokens.trained_per_step == pytest.approx(sum(responses) / 4)
    assert plan.tokens.total == pytest.approx(2.5 * sum(s.num_tokens for s in samples), abs=1)
    assert plan.tokens.longest_sample == max(
        row.num_tokens for row in (*samples, *plan.data.heldout) if isinstance(row, Sample)
    )
    assert plan.tokens.cut_off == 0


def test_the_description_is_for_people(models: Path, tmp_path: Path) -> None:
    text = plan_of(models, tmp_path, learner={"warmup_steps": 2}, teacher={"kv_cache_gib": 0.00001}).describe()
    assert text.startswith("Plan of run 'tiny': off-policy")
    for part in (
        "40 read: 32 to train on, 7 held out, 1 not used",
        "1 not used: no response",
        "10 steps of 8 samples = 2.50 epochs",
        "1e-05, cosine, after 2 warm-up steps",
        "in <|im_end|> (id 2)",
        "2 CPU cores, shared by 1 learner rank and 1 teacher engine",
        "! teachers.0.kv_cache_gib is 1e-05",
    ):
        assert part in text
    paths = (str(models), str(tmp_path))
    assert [line for line in text.splitlines() if len(line) > 100 and not any(p in line for p in paths)] == []


# models


def test_another_tokenizer_is_refused_with_the_differences(changed: Path, tmp_path: Path) -> None:
    other = byte_tokenizer(extra_special=[AddedToken("<extra>", special=True), AddedToken("<more>", special=True)])
    other.save_pretrained(changed / "teacher")
    size = len(byte_tokenizer())
    with pytest.raises(
        ValueError, match=rf"teachers\.0\.model .* of {size} and {size + 2} tokens, 2 ids differ"
    ) as caught:
        plan_of(changed, tmp_path)
    assert f"id {size} is missing for the student, '<extra>' for the teacher; id {size + 1}" in str(caught.value)


def test_two_swapped_tokens_are_enough_to_refuse(changed: Path, tmp_path: Path) -> None:
    path = changed / "teacher" / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=r"2 ids differ\. id \d+ is 'a' for the student, 'b' for the teacher"):
        plan_of(changed, tmp_path)


def test_too_few_embedding_rows_are_refused(changed: Path, tmp_path: Path) -> None:
    make_tiny(changed / "teacher", "llama", tied=True, vocab=64)
    with pytest.raises(
        ValueError, match=r"teachers\.0\.model .* has 64 embedding rows, but its tokenizer has ids up to"
    ):
        plan_of(changed, tmp_path)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("student", lambda f: shutil.rmtree(f), r"student\.model: model .* does not exist"),
        ("teacher", lambda f: shutil.rmtree(f), r"teachers\.0\.model: model .* does not exist"),
        (
            "student",
            lambda f: (f / "config.json").write_text("{"),
            r"student\.model .*: its config\.json cannot be used",
        ),
        ("teacher", lambda f: edit_config(f, model_type="nope"), r"teachers\.0\.model .* cannot be used: .*`nope`"),
        ("teacher", lambda f: (f / "tokenizer.json").unlink(), r"teachers\.0\.model .*: no tokenizer can be loaded"),
        ("student", lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors"),
        ("student", lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), r"safetensors is damaged or cut short"),
        ("student", lambda f: edit_config(f, mlp_bias=True), r"student\.model has mlp_bias"),
    ],
)
def test_a_model_that_cannot_be_used_is_named(
    changed: Path, tmp_path: Path, name: str, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(changed / name)
    with pytest.raises(ValueError, match=message):
        plan_of(changed, tmp_path)


def test_a_teacher_need_not_be_one_that_the_learner_trains(changed: Path, tmp_path: Path) -> None:
    edit_config(changed / "teacher", mlp_bias=True)
    assert plan_of(changed, tmp_path).teachers[0].config.mlp_bias


def test_templates_are_compared(changed: Path, tmp_path: Path) -> None:
    byte_tokenizer(CHATML_WITH_BOS).save_pretrained(changed / "teacher")
    assert ["another chat template" in w for w in plan_of(changed, tmp_path).warnings] == [True]
    shutil.rmtree(changed / "student")
    shutil.copytree(changed / "teacher", changed / "student")
    (changed / "student" / "chat_template.jinja").unlink()
    edit_config(changed / "student")
    plain = plan_of(changed, tmp_path, teacher={"model": str(changed / "student")})
    assert ["no chat template" in w or "is the student itself" in w for w in plain.warnings] == [True, True]
    assert CHATML in CHATML_WITH_BOS


# sizes


def test_top_k_must_be_there(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"objective\.top_k is 600, but there are 512 ids"):
        plan_of(models, tmp_path, objective={"top_k": 600})


def test_the_window_is_the_students_or_the_teachers_less_one(changed: Path, tmp_path: Path) -> None:
    edit_config(changed / "student", max_position_embeddings=100)
    plan = plan_of(changed, tmp_path)
    assert plan.window == 100
    assert "max_response_tokens is 400, but the models take 100 tokens" in plan.warnings[0]
    edit_config(changed / "teacher", max_position_embeddings=100)
    assert plan_of(changed, tmp_path).window == 99


def test_rows_beyond_the_window_are_not_used(changed: Path, tmp_path: Path) -> None:
    edit_config(changed / "teacher", max_position_embeddings=20)
    with pytest.raises(ValueError, match="does not fit the models' context"):
        plan_of(changed, tmp_path)


def test_epochs_can_end_the_run_before_max_steps(models: Path, tmp_path: Path) -> None:
    plan = plan_of(models, tmp_path, run={"max_steps": 100, "max_epochs": 2, "samples_per_step": 10})
    assert (plan.num_steps, plan.num_samples, plan.epochs) == (7, 64, 2.0)
    assert plan.warnings == ("run.max_epochs 2 ends the run after 7 of run.max_steps 100 steps",)


def test_a_warm_up_longer_than_the_data_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"learner\.warmup_steps is 4, but run\.max_epochs 1 over 32 samples makes only 4"
    ):
        plan_of(models, tmp_path, run={"max_epochs": 1}, learner={"warmup_steps": 4})


def test_too_few_rows_for_a_step_are_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.samples_per_step is 33, but only 32 usable rows"):
        plan_of(models, tmp_path, run={"samples_per_step": 33})


def test_what_may_be_unwanted_is_a_warning(models: Path, tmp_path: Path) -> None:
    data = {"heldout_rows": 0, "max_response_tokens": 3, "overlong_response": "truncate"}
    warnings = plan_of(models, tmp_path, data=data).warnings
    assert [w[:36] for w in warnings] == [
        "39 of 39 answers are cut off and tra",
        "no rows are held out: nothing is eva",
    ]


# machine


def test_gpus_are_counted(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sections: dict[str, Settings] = {
        "learner": {"data_parallel": 2},
        "teacher": {"num_engines": 2, "tensor_parallel": 2},
    }
    small, large = (HostProfile.cuda(num_cpus=8, num_gpus=n) for n in (5, 6))
    message = r"asks for 6 GPUs = 2 \(learner\.data_parallel\) \+ 4 \(teachers\.0\.num_engines x .*machine has 5; lower"
    with pytest.raises(ValueError, match=message):
        plan_of(models, tmp_path, small, **sections)
    plan = plan_of(models, tmp_path, large, **sections)
    assert plan.warnings == ()
    assert "6 GPUs for 2 learner ranks and 2 teacher engines" in plan.describe()
    assert plan.estimates.engines[0].kv_cache == 0
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "the cluster must have more" in plan_of(models, tmp_path, small, **sections).warnings[0]


def test_more_ranks_than_cores_is_a_warning(models: Path, tmp_path: Path) -> None:
    warnings = plan_of(models, tmp_path, learner={"data_parallel": 3}).warnings
    assert warnings == ("learner.data_parallel is 3 on 2 CPU cores: the ranks will take turns",)


def test_memory_that_cannot_suffice_is_refused(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "machine_memory", lambda: (GIB // 100, GIB // 100))
    with pytest.raises(ValueError, match=r"weights, gradients, optimizer and KV cache, but this machine has 10 MiB"):
        plan_of(models, tmp_path)
    with pytest.raises(ValueError, match=r"less teacher\.kv_cache_gib"):
        plan_of(models, tmp_path, teacher={"kv_cache_gib": 9.0})


def test_memory_that_is_in_use_is_a_warning(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "machine_memory", lambda: (8 * GIB, GIB))
    assert "1.0 GiB are free: it may be killed for memory" in plan_of(models, tmp_path).warnings[0]


def test_disk_that_cannot_hold_the_checkpoints_is_refused(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "free_disk", lambda folder: 11 * 10**6)
    with pytest.raises(
        ValueError,
        match=r"output_dir .* has 10 MiB free, but 4 checkpoints of 10 MiB need 39 MiB; .* lower run\.keep_last",
    ):
        plan_of(models, tmp_path, run={"save_every": 1})
    assert plan_of(models, tmp_path).estimates.checkpoints_kept == 1


# arithmetic


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_in_the_files(tmp_path: Path, tied: bool) -> None:
    make_tiny(tmp_path / "whole", "qwen3", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert count_parameters(tmp_path / "whole") == model.num_parameters()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="500KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert count_parameters(tmp_path / "sharded") == model.num_parameters()


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 2 + 4 + 12), ("fp32", 4 + 4 + 8)])
def test_the_learners_state_is_counted_in_bytes_per_parameter(models: Path, dtype: str, each: int) -> None:
    config = AutoConfig.from_pretrained(models / "student")
    learner = LearnerConfig.model_validate({"dtype": dtype, "data_parallel": 4})
    memory = learner_memory(1000, config, learner)
    assert memory.state == 1000 * each
    assert memory.total > memory.state
    split = learner_memory(1000, config, learner.model_copy(update={"distributed_optimizer": True}))
    assert split.optimizer == memory.optimizer // 4
    assert learner_memory(1000, config, learner.model_copy(update={"recompute": True})).activations < memory.activations
    assert checkpoint_bytes(1000, learner) == 1000 * (12 + (2 if dtype == "bf16" else 4))


def test_the_kv_cache_is_counted_per_layer_and_kv_head(models: Path) -> None:
    config = AutoConfig.from_pretrained(models / "teacher")
    assert kv_cache_bytes(10, config, "bf16") == 10 * 2 * 3 * 2 * 32 * 2


def test_a_containers_memory_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(estimates, "_CGROUP_LIMIT", limit)
    total, _ = machine_memory()
    limit.write_text("max\n")
    assert machine_memory()[0] == total
    limit.write_text(f"{total // 3}\n")
    assert machine_memory() == (total // 3, min(total // 3, machine_memory()[1]))


def test_activations_grow_with_the_microbatch_only_in_their_part() -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2))
    config = model.config
    small, large = (
        learner_memory(1000, config, LearnerConfig.model_validate({"max_tokens_per_microbatch": n})) for n in (100, 200)
    )
    assert dataclasses.replace(large, activations=small.activations) == small
    assert large.activations > small.activations


def with_rollouts(config: RunConfig, **rollout: object) -> RunConfig:
    tree = {**config.model_dump(), "rollout": rollout, "weight_sync": {}}
    return RunConfig.model_validate(tree)


def test_a_plan_with_rollouts(models: Path, tmp_path: Path) -> None:
    config = make_config(models, tmp_path)
    plan = make_plan(with_rollouts(config, max_new_tokens=30), CPU)
    assert plan.longest_sequence == plan.tokens.longest_prompt + 30
    assert plan.tokens.trained_per_step == 8 * 30, "at most"
    assert plan.estimates.rollout is not None
    assert plan.estimates.total_memory > make_plan(config, CPU).estimates.total_memory
    text = " ".join(plan.describe().split())
    assert "on-policy, from the student's own answers" in text
    assert "1 rollout engine, 1 learner rank and 1 teacher engine" in text
    assert "at most 240 trained tokens" in text
    assert "up to 30 tokens, temperature 1" in text
    mixed = make_plan(with_rollouts(config, max_new_tokens=30, on_policy_fraction=0.25), CPU)
    assert "mixed, 25% of the answers from the student" in mixed.describe()


@pytest.mark.parametrize(
    ("transport", "host", "message"),
    [
        (
            "auto",
            HostProfile.cuda(num_cpus=8, num_gpus=4),
            r"transport is auto, .* cupy is not installed; install cupy-",
        ),
        ("nccl", CPU, r"transport is nccl, but there is no GPU; use shared_memory, gloo or auto"),
    ],
)
def test_a_transport_that_cannot_work_stops_the_plan(
    models: Path, tmp_path: Path, transport: str, host: HostProfile, message: str
) -> None:
    tree = with_rollouts(make_config(models, tmp_path)).model_dump()
    tree["weight_sync"]["transport"] = transport
    with pytest.raises(ValueError, match=message):
        make_plan(RunConfig.model_validate(tree), host)


def test_answers_that_do_not_fit_the_models_stop_the_plan(models: Path, tmp_path: Path) -> None:
    config = make_config(models, tmp_path)
    with pytest.raises(ValueError, match=r"rollout\.max_new_tokens is 500 and the longest prompt has \d+ tokens, but"):
        make_plan(with_rollouts(config, max_new_tokens=500), CPU)


def test_cross_entropy_alone_needs_data_set_answers(models: Path, tmp_path: Path) -> None:
    tree = make_config(models, tmp_path).model_dump()
    tree["objective"] = {"kd_weight": 0.0, "ce_weight": 1.0}
    text = make_plan(RunConfig.model_validate(tree), CPU).describe()
    assert "1 x cross-entropy alone; the teacher only measures" in text
    with pytest.raises(ValueError, match=r"kd_weight is 0.* set rollout\.on_policy_fraction=0"):
        RunConfig.model_validate(tree | {"rollout": {}, "weight_sync": {}})
    with pytest.raises(ValueError, match="kd_weight and ce_weight are both 0"):
        GkdObjective(kd_weight=0.0)


def test_rollout_engines_need_gpus_too(models: Path, tmp_path: Path) -> None:
    config = with_rollouts(make_config(models, tmp_path), num_engines=2, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"asks for 6 GPUs .* 4 \(rollout\.num_engines x rollout\.tensor_parallel\)"):
        make_plan(config, HostProfile.cuda(num_cpus=8, num_gpus=4))


def test_a_grader_that_does_not_fit_the_rows_stops_the_plan(models: Path, tmp_path: Path) -> None:
    config = make_config(models, tmp_path, data={"grader": "gsm8k"})
    with pytest.raises(ValueError, match=r"data\.grader is 'gsm8k', but it cannot read the reference"):
        make_plan(with_rollouts(config), CPU)


def test_prompts_without_answers(models: Path, tmp_path: Path) -> None:
    config = make_config(models, tmp_path)
    tree = with_rollouts(config, max_new_tokens=30).model_dump()
    tree["data"]["response_column"] = None
    plan = make_plan(RunConfig.model_validate(tree), CPU)
    assert plan.tokens.trained_per_step == 8 * 30
    assert "none: the student answers" in plan.describe()
    with pytest.raises(ValueError, match=r"data\.response_column is none, so the student must write all answers"):
        RunConfig.model_validate({**tree, "rollout": None, "weight_sync": None})
