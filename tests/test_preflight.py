"""What a preflight check says about paths, servers, stages and what they start from."""

import warnings
from pathlib import Path

import pytest

from ebbflow.algorithms.base import Algorithm
from ebbflow.algorithms.built_in.distillation import DistillationConfig
from ebbflow.data.pairs import PairError
from ebbflow.data.prompts import PromptError
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.algorithms import TrajectoryConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.policy_metadata import write_base_policy
from tests.preflight_cases import SERVER


def test_a_laptop_may_keep_everything_on_its_disk(tmp_path: Path) -> None:
    check_recipe(Recipe(output=str(tmp_path)), f"sqlite:///{tmp_path}/mlflow.db", on_cluster=False)


def test_a_cluster_needs_an_output_that_outlives_the_pod(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="lost with it; give a URI"):
        check_recipe(Recipe(output=str(tmp_path)), SERVER, on_cluster=True)


def test_a_cluster_needs_a_tracking_server() -> None:
    with pytest.raises(RecipeError, match="disk of a pod; set tracking.uri"):
        check_recipe(
            Recipe(output="s3://bucket/runs"), "sqlite:////root/mlflow.db", on_cluster=True
        )
    check_recipe(Recipe(output="s3://bucket/runs"), SERVER, on_cluster=True)


def with_pairs(tmp_path: Path, pairs: str) -> Recipe:
    return Recipe.model_validate(
        {
            "output": str(tmp_path),
            "stages": [{"kind": "online"}, {"kind": "offline", "pairs": pairs}],
        }
    )


def test_a_pairs_file_must_be_there(tmp_path: Path) -> None:
    recipe = with_pairs(tmp_path, str(tmp_path / "none.parquet"))
    with pytest.raises(
        RecipeError, match=r"stages\.1\.pairs = .*none\.parquet.* no such file; .*Remove it"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_a_pairs_file_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "p", "chosen": "a.png", "rejected": "b.png"}\n'
    )
    with pytest.raises(
        PairError, match=r"pairs\.jsonl, line 1: chosen = 'a\.png' is no image file"
    ):
        check_recipe(with_pairs(tmp_path, str(tmp_path / "pairs.jsonl")), SERVER, on_cluster=False)


def test_a_cluster_needs_pairs_at_a_uri(tmp_path: Path) -> None:
    recipe = with_pairs(tmp_path, "pairs.parquet").model_copy(update={"output": "s3://bucket/runs"})
    with pytest.raises(
        RecipeError, match=r"stages\.1\.pairs = 'pairs\.parquet' is a local path.* give its URI"
    ):
        check_recipe(recipe, SERVER, on_cluster=True)
    there = with_pairs(tmp_path, "s3://bucket/pairs.parquet").model_copy(
        update={"output": "s3://bucket/runs"}
    )
    check_recipe(there, SERVER, on_cluster=True)


class Mine(TrajectoryConfig):
    """Distillation of my own."""

    stage_defaults = DistillationConfig.stage_defaults
    teacher: str = "nowhere"


MINE = Algorithm(
    Mine, lambda rows, config: (-rows.log_prob, {}), copies=lambda config: frozenset({"teacher"})
)
BROKEN = Algorithm(TrajectoryConfig, lambda rows, config: (None, {}))


def with_teacher(output: str, teacher: str, own: bool = False) -> Recipe:
    distillation = {"name": "distillation", "teacher": teacher}
    custom = {"name": "custom", "path": f"{__name__}:MINE", "options": {"teacher": teacher}}
    stages = [{"kind": "offline"}, {"kind": "online", "algorithm": custom if own else distillation}]
    return Recipe.model_validate({"output": output, "stages": stages})


def test_a_teacher_is_a_policy_folder(tmp_path: Path) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    check_recipe(with_teacher(str(tmp_path), str(tmp_path / "teacher")), SERVER, on_cluster=False)


@pytest.mark.parametrize(
    ("own", "key"),
    [(False, r"stages\.1\.algorithm\.teacher"), (True, r"stages\.1\.algorithm\.options\.teacher")],
)
def test_a_teacher_must_be_there_and_whole(tmp_path: Path, own: bool, key: str) -> None:
    def check(folder: str) -> None:
        check_recipe(
            with_teacher(str(tmp_path), str(tmp_path / folder), own), SERVER, on_cluster=False
        )

    with pytest.raises(
        RecipeError, match=rf"{key} = '.*none' is not the policy folder .*none has no COMMIT"
    ):
        check("none")
    with write_new_folder(tmp_path / "other") as folder:
        (folder / "readme.txt").write_text("no policy")
    with pytest.raises(
        RecipeError, match=rf"{key} = '.*other' is not the policy folder .* is no policy folder"
    ):
        check("other")
    write_base_policy(tmp_path / "cut", "base", "recipe", PolicyConfig())
    (tmp_path / "cut" / "policy.json").write_text("{")
    with pytest.raises(
        RecipeError,
        match=rf"{key} = '.*cut' is not the policy folder .* does not match its manifest",
    ):
        check("cut")


def test_the_teacher_of_every_prompt_set_must_be_there(tmp_path: Path) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    stage = {
        "kind": "online",
        "algorithm": {
            "name": "distillation",
            "teachers": {"a": str(tmp_path / "teacher"), "b": "none"},
        },
    }
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(f'"{name}{other}"' for other in "cdefghijkl")
        )
    prompts = {
        "mixture": [{"name": name, "source": str(tmp_path / f"{name}.txt")} for name in "ab"],
        "validation": 1,
        "held_out": 2,
    }
    recipe = Recipe.model_validate({"output": str(tmp_path), "prompts": prompts, "stages": [stage]})
    with pytest.raises(
        RecipeError, match=r"stages\.0\.algorithm\.teachers\.b = 'none' is not the policy folder"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


@pytest.mark.parametrize("own", [False, True])
def test_a_cluster_needs_a_teacher_at_a_uri(tmp_path: Path, own: bool) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    with pytest.raises(RecipeError, match=r"teacher = '.*teacher' is a local path.* give its URI"):
        check_recipe(
            with_teacher("s3://bucket/runs", str(tmp_path / "teacher"), own),
            SERVER,
            on_cluster=True,
        )
    check_recipe(
        with_teacher("s3://bucket/runs", "s3://bucket/teacher", own), SERVER, on_cluster=True
    )


def test_a_loss_of_ones_own_is_called(tmp_path: Path) -> None:
    custom = {"name": "custom", "path": f"{__name__}:BROKEN"}
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "stages": [{"kind": "online", "algorithm": custom}]}
    )
    with pytest.raises(
        RecipeError, match=r"the loss of .*:BROKEN, .*<lambda>, returned \(a NoneType, a dict\)"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_checking_a_recipe_writes_nothing(tmp_path: Path) -> None:
    check_recipe(Recipe(output=str(tmp_path / "deep" / "runs")), SERVER, on_cluster=False)
    assert list(tmp_path.iterdir()) == []


def test_a_start_is_a_policy_or_a_lora(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "notes.txt").touch()
    start = {"train": "lora", "start": {"path": str(tmp_path / "start")}}
    with pytest.raises(
        RecipeError,
        match=r"is no policy folder and holds no LoRA \(.safetensors\); name one of them",
    ):
        check_recipe(
            Recipe.model_validate({"output": str(tmp_path), "policy": start}),
            SERVER,
            on_cluster=False,
        )


def test_a_start_must_be_there(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "policy": {"train": "lora", "start": {"path": "owner/lora"}}}
    )
    with pytest.raises(
        RecipeError, match=r"policy.start.path = 'owner/lora': no such .* policy.start.revision"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


STUDENT = {"kind": "online", "algorithm": {"name": "dmd2"}}
LEARNING_ON = {
    "kind": "online",
    "algorithm": {"name": "diffusion_nft"},
    "sampler": {"name": "ode", "steps": 4},
}


@pytest.mark.parametrize("stages", [[STUDENT], [{"kind": "online"}, STUDENT, LEARNING_ON]])
def test_a_student_that_is_evaluated_with_another_sampler_is_warned_of(
    tmp_path: Path, stages: list[dict[str, object]]
) -> None:
    of_student = {"sampler": "cps", "eta": 1.0, "steps": 4}
    for other in ({}, {"steps": 4}, of_student | {"eta": 0.8}, of_student | {"steps": 8}):
        recipe = Recipe.model_validate(
            {"output": str(tmp_path), "stages": stages, "evaluation": other}
        )
        says = rf"stages\.{len(stages) // 2} .*set evaluation: \{{sampler: cps, eta: 1, steps: 4\}}"
        with pytest.warns(UserWarning, match=says):
            check_recipe(recipe, SERVER, on_cluster=False)
    # Without guardrails: on a machine without tesseract, leaving that one out is a warning, too.
    settings = {"stages": stages, "evaluation": of_student, "guardrails": []}
    recipe = Recipe.model_validate({"output": str(tmp_path)} | settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_recipe(recipe, SERVER, on_cluster=False)


def test_a_run_that_is_started_from_the_root_leaves_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(RecipeError, match=r"output = 'runs' would be /runs, as the working direct"):
        check_recipe(Recipe(), SERVER, on_cluster=False)


def test_all_errors_of_a_recipe_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    text = f"""
name: wrong
output: {tmp_path}/file/runs
prompts:
  source: {tmp_path}/none.txt
stages:
  - kind: online
  - kind: offline
    pairs: {tmp_path}/none.parquet
policy:
  start: {{path: {tmp_path}/none}}
rewards:
  - "no_such_module:score"
"""
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as raised:
        check_recipe(load_recipe(path), SERVER, on_cluster=False)
    lines = str(raised.value).splitlines()
    assert [line.removeprefix(f"{path}:").split(" = ")[0] for line in lines] == [
        "3: output",
        "5: prompts.source",
        "9: stages.1.pairs",
        "13: no_such_module:score cannot be imported (No module named 'no_such_module'); install"
        " its package, put it beside the recipe or in the working directory, or put its folder on"
        " PYTHONPATH",
        "11: policy.start.path",
    ]


def test_a_single_error_keeps_its_type_and_gets_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    (tmp_path / "few.txt").write_text("a cat\n")
    path.write_text(f"name: wrong\noutput: {tmp_path}\nprompts:\n  source: few.txt\n")
    with pytest.raises(PromptError, match=rf"^{path}:3: "):
        check_recipe(load_recipe(path), SERVER, on_cluster=False)
