from pathlib import Path

import pytest

from ebbflow.algorithms.base import Algorithm
from ebbflow.algorithms.built_in.distillation import DistillationConfig
from ebbflow.data.pairs import PairError
from ebbflow.models import ModelError
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.algorithms import TrajectoryConfig
from ebbflow.recipe.recipe import PolicyConfig
from ebbflow.storage.artifacts import new_folder
from ebbflow.training.policy_metadata import write_base_policy

SERVER = "https://mlflow.example"


def test_a_laptop_may_keep_everything_on_its_disk(tmp_path: Path) -> None:
    check_recipe(Recipe(output=str(tmp_path)), f"sqlite:///{tmp_path}/mlflow.db", on_cluster=False)


def test_a_cluster_needs_an_output_that_outlives_the_pod(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="lost with it; give a URI"):
        check_recipe(Recipe(output=str(tmp_path)), SERVER, on_cluster=True)


def test_a_cluster_needs_a_tracking_server() -> None:
    with pytest.raises(RecipeError, match="disk of a pod; set tracking.uri"):
        check_recipe(Recipe(output="s3://bucket/runs"), "sqlite:////root/mlflow.db", on_cluster=True)
    check_recipe(Recipe(output="s3://bucket/runs"), SERVER, on_cluster=True)


def with_pairs(tmp_path: Path, pairs: str) -> Recipe:
    return Recipe.model_validate({"output": str(tmp_path), "stages": [{"kind": "online"}, {"kind": "offline", "pairs": pairs}]})


def test_a_pairs_file_must_be_there(tmp_path: Path) -> None:
    recipe = with_pairs(tmp_path, str(tmp_path / "none.parquet"))
    with pytest.raises(RecipeError, match=r"stages\.1\.pairs = .*none\.parquet.* no such file; remove it"):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_a_pairs_file_must_be_readable(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a.png", "rejected": "b.png"}\n')
    with pytest.raises(PairError, match=r"pairs\.jsonl, line 1: chosen = 'a\.png' is no image file"):
        check_recipe(with_pairs(tmp_path, str(tmp_path / "pairs.jsonl")), SERVER, on_cluster=False)


def test_a_cluster_needs_pairs_at_a_uri(tmp_path: Path) -> None:
    recipe = with_pairs(tmp_path, "pairs.parquet").model_copy(update={"output": "s3://bucket/runs"})
    with pytest.raises(RecipeError, match=r"stages\.1\.pairs = 'pairs\.parquet' is a local path.* give its URI"):
        check_recipe(recipe, SERVER, on_cluster=True)
    there = with_pairs(tmp_path, "s3://bucket/pairs.parquet").model_copy(update={"output": "s3://bucket/runs"})
    check_recipe(there, SERVER, on_cluster=True)


class Mine(TrajectoryConfig):
    """Distillation of my own."""

    stage_defaults = DistillationConfig.stage_defaults
    teacher: str = "nowhere"


MINE = Algorithm(Mine, lambda rows, config: (None, {}), copies=lambda config: frozenset({"teacher"}))


def with_teacher(output: str, teacher: str, own: bool = False) -> Recipe:
    distillation = {"name": "distillation", "teacher": teacher}
    custom = {"name": "custom", "path": f"{__name__}:MINE", "options": {"teacher": teacher}}
    stages = [{"kind": "offline"}, {"kind": "online", "algorithm": custom if own else distillation}]
    return Recipe.model_validate({"output": output, "stages": stages})


def test_a_teacher_is_a_policy_folder(tmp_path: Path) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    check_recipe(with_teacher(str(tmp_path), str(tmp_path / "teacher")), SERVER, on_cluster=False)


@pytest.mark.parametrize(
    ("own", "key"), [(False, r"stages\.1\.algorithm\.teacher"), (True, r"stages\.1\.algorithm\.options\.teacher")]
)
def test_a_teacher_must_be_there_and_whole(tmp_path: Path, own: bool, key: str) -> None:
    def check(folder: str) -> None:
        check_recipe(with_teacher(str(tmp_path), str(tmp_path / folder), own), SERVER, on_cluster=False)

    with pytest.raises(RecipeError, match=rf"{key} = '.*none' is not the policy folder .*none has no COMMIT"):
        check("none")
    with new_folder(tmp_path / "other") as folder:
        (folder / "readme.txt").write_text("no policy")
    with pytest.raises(RecipeError, match=rf"{key} = '.*other' is not the policy folder .* is no policy folder"):
        check("other")
    write_base_policy(tmp_path / "cut", "base", "recipe", PolicyConfig())
    (tmp_path / "cut" / "policy.json").write_text("{")
    with pytest.raises(RecipeError, match=rf"{key} = '.*cut' is not the policy folder .* does not match its manifest"):
        check("cut")


@pytest.mark.parametrize("own", [False, True])
def test_a_cluster_needs_a_teacher_at_a_uri(tmp_path: Path, own: bool) -> None:
    write_base_policy(tmp_path / "teacher", "base", "recipe", PolicyConfig())
    with pytest.raises(RecipeError, match=r"teacher = '.*teacher' is a local path.* give its URI"):
        check_recipe(with_teacher("s3://bucket/runs", str(tmp_path / "teacher"), own), SERVER, on_cluster=True)
    check_recipe(with_teacher("s3://bucket/runs", "s3://bucket/teacher", own), SERVER, on_cluster=True)


def with_model(tmp_path: Path, **model: str) -> Recipe:
    return Recipe.model_validate({"output": str(tmp_path), "model": model})


def test_a_base_model_of_another_family_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"base is not a sd3 base model: model_index.json missing.* as model.revision"):
        check_recipe(with_model(tmp_path, family="sd3", path=str(folder)), SERVER, on_cluster=False)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ModelError, match="is a FluxPipeline, and model.family = 'sd3' .* set model.family to flux"):
        check_recipe(with_model(tmp_path, family="sd3", path=str(folder)), SERVER, on_cluster=False)
    check_recipe(with_model(tmp_path, family="flux", path=str(folder)), SERVER, on_cluster=False)


def test_a_cluster_needs_a_base_model_that_every_pod_can_fetch(tmp_path: Path) -> None:
    shared = {"output": "s3://bucket/runs"}
    local = with_model(tmp_path, family="sd3", path="models/sd3").model_copy(update=shared)
    with pytest.raises(RecipeError, match="model.path = 'models/sd3' is a local path"):
        check_recipe(local, SERVER, on_cluster=True)
    pinned = with_model(tmp_path, family="sd3", path="owner/sd3", revision="0" * 40).model_copy(update=shared)
    check_recipe(pinned, SERVER, on_cluster=True)


def test_a_start_must_be_there(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"output": str(tmp_path), "policy": {"train": "lora", "start": {"path": "owner/lora"}}})
    with pytest.raises(RecipeError, match=r"policy.start.path = 'owner/lora': no such .* policy.start.revision"):
        check_recipe(recipe, SERVER, on_cluster=False)
