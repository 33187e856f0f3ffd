from pathlib import Path

import pytest

from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError

SERVER = "https://mlflow.example"


def test_a_laptop_may_keep_everything_on_its_disk(tmp_path: Path) -> None:
    check_recipe(Recipe(output=str(tmp_path)), f"sqlite:///{tmp_path}/mlflow.db", on_cluster=False)


def test_a_cluster_needs_an_output_that_outlives_the_pod(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="gone with it; name a URI"):
        check_recipe(Recipe(output=str(tmp_path)), SERVER, on_cluster=True)


def test_a_cluster_needs_a_tracking_server() -> None:
    with pytest.raises(RecipeError, match="disk of this pod; set tracking.uri"):
        check_recipe(Recipe(output="s3://bucket/runs"), "sqlite:////root/mlflow.db", on_cluster=True)
    check_recipe(Recipe(output="s3://bucket/runs"), SERVER, on_cluster=True)


def test_a_password_stays_out_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="MLFLOW_TRACKING_PASSWORD") as error:
        check_recipe(Recipe(output=str(tmp_path)), "https://me:hunter2@mlflow.example", on_cluster=False)
    assert "hunter2" not in str(error.value)
