"""Recipes, `--set`, the list of keys, and that every message names the key, the value and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import RolloutConfig, RunConfig, WeightSyncConfig
from opd.device import HostProfile
from opd.recipes import config_json, keys_markdown, keys_table, list_keys, load_recipe, override

HOST = HostProfile.cpu(num_cpus=2)
RECIPE = """
from opd.config import *

def recipe(host):
    return RunConfig(
        name="mine",
        student=StudentConfig(model="s"),
        teachers=[TeacherConfig(model="t")],
        data=DataConfig(source="rows.jsonl"),
        run=LoopConfig(max_steps=host.num_cpus),
    )
"""


def make_config(*, max_steps: int = 10) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "mine",
            "student": {"model": "s"},
            "teachers": [{"model": "t"}],
            "data": {"source": "rows.jsonl"},
            "run": {"max_steps": max_steps},
        }
    )


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# recipes


def test_a_recipe_gets_the_host_and_gives_its_config(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, RECIPE), HOST) == make_config(max_steps=2)


def test_a_recipe_may_build_on_its_sibling(tmp_path: Path) -> None:
    write(tmp_path, RECIPE, "opd_test_base.py")
    text = "import opd_test_base\ndef recipe(host):\n    return opd_test_base.recipe(host)\n"
    assert load_recipe(write(tmp_path, text), HOST).name == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gkd_ofpolicy.py", r"does not exist; did you mean .*/gkd_offpolicy\.py\? Recipes there: .*/gkd_offpolicy\.py"),
        ("gkd_offpolicy", r"does not exist; did you mean .*/gkd_offpolicy\.py\?"),
        ("nothing_like_it.py", r"does not exist\. Recipes there: .*/gkd_offpolicy\.py, .*/other\.py"),
        ("notes.txt", r"is no Python file \(\.py\)"),
        ("", r"is a folder\. Recipes there"),
    ],
)
def test_no_such_recipe(tmp_path: Path, name: str, message: str) -> None:
    for recipe in ("gkd_offpolicy.py", "other.py", "notes.txt"):
        write(tmp_path, RECIPE, recipe)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / name, HOST)


def test_a_missing_folder_shows_the_recipes_that_come_with_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    write(tmp_path / "recipes", RECIPE, "gkd.py")
    with pytest.raises(ValueError, match=r"recipe gkd does not exist; did you mean recipes/gkd\.py\?"):
        load_recipe(Path("gkd"), HOST)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"mine\.py has no function recipe\(host\)"),
        ("recipe = 3\n", r"mine\.py has no function recipe\(host\)"),
        ("def recipe(host):\n    pass\n", r"recipe\(host\) returns None; it must return an opd\.config\.RunConfig"),
        ("def recipe(host)\n    pass\n", r"mine\.py:1: SyntaxError: expected ':'"),
        ("import not_a_module\n", r"mine\.py:1: ModuleNotFoundError: .*not_a_module"),
        ("def recipe():\n    pass\n", r"mine\.py: TypeError: recipe\(\) takes 0 positional arguments"),
        ("def recipe(host):\n    x = 1\n    return x / 0\n", r"mine\.py:3: ZeroDivisionError: division by zero"),
        ("import json\ndef recipe(host):\n    json.loads('{')\n", r"mine\.py:3: JSONDecodeError: "),
        ("def recipe(host):\n    raise ValueError('no GPU here')\n", r"mine\.py:2: no GPU here$"),
    ],
)
def test_a_recipe_that_fails_is_shown_with_its_own_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(write(tmp_path, text), HOST)
    assert "opd/recipes.py" not in str(caught.value)


def test_settings_that_are_not_allowed_are_listed_one_by_one(tmp_path: Path) -> None:
    text = "from opd.config import *\ndef recipe(host):\n    return LearnerConfig(lr=-1.0, schedule='cos', warmup=2)\n"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        load_recipe(write(tmp_path, text), HOST)
    first, *rest = str(caught.value).splitlines()
    assert first == f"{tmp_path}/mine.py:3: these settings are not allowed:"
    assert rest == [
        "  learner.lr is -1.0; allowed: number > 0",
        "  learner.schedule is 'cos'; allowed: constant | linear | cosine",
        "  learner.warmup: there is no such setting; did you mean learner.warmup_steps?",
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("DataConfig()", r"data\.source is missing; allowed: text$"),
        ("TeacherConfig(model='t', dtype='fp16')", r"teachers\.0\.dtype is 'fp16'; allowed: fp32 \| bf16$"),
        ("GkdObjective(temperature=2.0)", r"  objective: temperature is 2\.0 but the tail bucket .* temperature=1$"),
        ("RunConfig()", r"student is missing; it is required"),
    ],
)
def test_every_kind_of_validation_error_is_put_in_words(tmp_path: Path, section: str, message: str) -> None:
    text = f"from opd.config import *\ndef recipe(host):\n    return {section}\n"
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(write(tmp_path, text), HOST)
    assert "pydantic" not in str(caught.value)


# --set


@pytest.mark.parametrize(
    ("assignment", "section", "name", "value"),
    [
        ("learner.lr=1e-5", "learner", "lr", 1e-5),
        ("learner.lr=2", "learner", "lr", 2.0),
        ("learner.recompute=true", "learner", "recompute", True),
        ("data.shuffle=False", "data", "shuffle", False),
        ("run.max_epochs=3", "run", "max_epochs", 3),
        ("run.max_epochs=none", "run", "max_epochs", None),
        ("learner.schedule=linear", "learner", "schedule", "linear"),
        ("data.source=a=b.jsonl", "data", "source", "a=b.jsonl"),
        ("data.source=12", "data", "source", "12"),
        ("data.source = rows with spaces.jsonl ", "data", "source", "rows with spaces.jsonl"),
        ("data.subset=None", "data", "subset", None),
        ("data.system_prompt=", "data", "system_prompt", ""),
        (
            'data.task_options={"n": 3, "deep": {"x": [1.5, null]}}',
            "data",
            "task_options",
            {"n": 3, "deep": {"x": [1.5, None]}},
        ),
    ],
)
def test_values_are_typed_by_their_field(assignment: str, section: str, name: str, value: object) -> None:
    changed = override(make_config(), [assignment]).model_dump()[section][name]
    assert changed == value
    assert type(changed) is type(value)


def test_top_level_keys_and_teachers_by_number_or_alias() -> None:
    changed = override(make_config(), ["output_dir=out/x", "teachers.0.dtype=fp32", "teacher.num_engines=2"])
    assert changed.output_dir == Path("out/x")
    assert (changed.teachers[0].dtype, changed.teachers[0].num_engines) == ("fp32", 2)
    assert override(changed, ["rollout=none"]) == changed


def test_the_given_config_stays_and_the_last_assignment_wins() -> None:
    config = make_config()
    assert override(config, ["run.seed=1", "run.seed=2"]).run.seed == 2
    assert config == make_config()


def test_the_order_of_assignments_does_not_matter_for_the_checks_between_keys() -> None:
    raised = override(make_config(), ["learner.warmup_steps=20", "run.max_steps=30"])
    assert (raised.learner.warmup_steps, raised.run.max_steps) == (20, 30)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("learner.lr", r"--set 'learner\.lr' is no assignment; write it as --set learner\.lr=1e-5"),
        ("=3", "is no assignment"),
        (
            "learner.lrr=1",
            r"--set learner\.lrr: there is no such setting; did you mean learner\.lr or learner\.min_lr\?",
        ),
        ("lr=1", r"there is no such setting; did you mean learner\.lr\?"),
        ("lerner.dtype=bf16", r"did you mean learner\.dtype or teachers\.0\.dtype\?"),
        ("teacher.dtyp=fp32", r"did you mean teachers\.0\.dtype"),
        ("learner.lr.x=1", "there is no such setting"),
        ("qqqqq=1", "there is no such setting; --list-keys shows all"),
        ("learner.lr=fast", r"learner\.lr is 'fast'; allowed: number > 0$"),
        ("learner.lr=-1", r"learner\.lr is -1\.0; allowed: number > 0$"),
        ("learner.lr=", r"learner\.lr is ''; allowed: number > 0$"),
        ("learner.lr=none", r"learner\.lr is 'none'; allowed: number > 0$"),
        ("run.max_steps=1.5", r"run\.max_steps is '1\.5'; allowed: integer > 0$"),
        ("run.max_epochs=0", r"run\.max_epochs is '0'; allowed: integer > 0 \| none$"),
        ("data.shuffle=maybe", r"data\.shuffle is 'maybe'; allowed: true \| false$"),
        ("data.task_options=[1]", r"data\.task_options is '\[1\]'; allowed: JSON object$"),
        ("data.task_options={", r"data\.task_options is '\{'; allowed: JSON object$"),
        ("data.task_options.n=1", r"data\.task_options is set as a whole, as data\.task_options='\{\"n\": 1\}'"),
        ("learner.schedule=cos", r"learner\.schedule is 'cos'; allowed: constant \| linear \| cosine$"),
        ("teachers.1.dtype=fp32", r"teachers has the entries 0 to 0, not '1'"),
        ("teachers.x=1", r"teachers has the entries 0 to 0, not 'x'"),
        ("teacher.dtype=fp16", r"teachers\.0\.dtype is 'fp16'; allowed: fp32 \| bf16"),
        ("learner=1", r"--set learner: this is a section; set its keys one by one, as learner\.dtype=\.\.\."),
        ("teachers=[]", "this is a section"),
        ("name=a/b", r"name is 'a/b'; allowed: text matching "),
        ("rollout=1", r"--set rollout=1: this is a section, none in this recipe; choose a recipe that has it"),
        ("rollout.top_p=1", r"--set rollout\.top_p: rollout is none in this recipe; choose a recipe that has it"),
        ("learner.warmup_steps=10", r"^learner\.warmup_steps is 10, not below run\.max_steps 10; lower it too$"),
        ("data.max_prompt_tokens=9000", r"^learner\.max_tokens_per_microbatch is 2048 but a sample may have 9512"),
        ("objective.temperature=2", r"^objective: temperature is 2\.0 but the tail bucket"),
    ],
)
def test_what_cannot_be_set_says_why(assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        override(make_config(), [assignment])
    assert "pydantic" not in str(caught.value)
    assert len(str(caught.value)) < 300


# all keys


def test_every_leaf_of_a_config_is_a_key_with_its_default() -> None:
    defaults = {info.key: info.default for info in list_keys()}
    config = make_config().model_copy(update={"rollout": RolloutConfig(), "weight_sync": WeightSyncConfig()})
    leaves: dict[str, Any] = dict(_leaves(json.loads(config.model_dump_json()), ""))
    assert set(defaults) == set(leaves)
    required = {"name", "student.model", "teachers.0.model", "data.source", "run.max_steps"}
    assert {key for key, default in defaults.items() if default == "required"} == required
    for key in set(defaults) - required:
        value = leaves[key]
        as_text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
        assert defaults[key] == (f"{value:g}" if isinstance(value, float) else as_text), key


def _leaves(node: object, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(node, list):
        return [leaf for i, item in enumerate(node) for leaf in _leaves(item, f"{prefix}{i}.")]
    if isinstance(node, dict) and (node or not prefix):
        return [leaf for name, item in node.items() for leaf in _leaves(item, f"{prefix}{name}.")]
    return [(prefix.removesuffix("."), node)]


def test_every_key_has_help() -> None:
    assert [info.key for info in list_keys() if not info.help] == []


def test_the_table_fits_the_terminal() -> None:
    table = keys_table(100)
    assert max(map(len, table.splitlines())) <= 100
    assert "learner.lr                         1e-05          peak learning rate [number > 0]" in table


def test_the_settings_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == keys_markdown(), "run: python -m tools.write_config_doc"


def test_the_saved_config_reads_back_equal() -> None:
    config = override(
        make_config(), ['data.task_options={"n": 3}', "output_dir=a/b", "learner.lr=3e-5", "run.max_epochs=2"]
    )
    assert RunConfig.model_validate_json(config_json(config)) == config
