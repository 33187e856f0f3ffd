"""The base image runs what a cluster asks of it, as any user, without a network and with nothing
but /tmp to write to.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

CHECK = """
from pathlib import Path
import workflows
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.families import FAMILIES

for path in sorted(Path(workflows.__file__).parent.glob("recipes/*.yaml")):
    settings = load_recipe(path).model_dump(mode="json") | {"output": "s3://bucket/runs"}
    if FAMILIES[settings["model"]["family"]].edits_images:  # its prompts are one's own
        settings["prompts"]["source"] = "s3://bucket/edits.parquet"
    check_recipe(Recipe.model_validate(settings), "https://mlflow.example", on_cluster=True)
    print(path.stem)
"""
"""Checks every recipe as the first pod of a run does."""
DRIVERS = "import boto3, s3fs, gcsfs, adlfs; print('ok')"


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("user", ["1000", "23456"])
def test_it_runs_as_any_user_and_writes_nowhere_else(run: Run, user: str) -> None:
    assert _said(run("id", "-u", user=user)) == f"{user}\n"
    assert (
        _said(
            run(
                "sh",
                "-c",
                "touch /tmp/x && ! touch /opt/ebbflow/x 2>/dev/null && echo $HOME",
                user=user,
            )
        )
        == "/tmp\n"
    )


def test_it_has_what_ray_pods_are_probed_with(run: Run) -> None:
    assert "Wget" in _said(run("wget", "--version"))


def test_it_has_what_stores_of_artifacts_need(run: Run) -> None:
    assert _said(run("python", "-c", DRIVERS)) == "ok\n"


def test_a_pod_accepts_every_recipe(run: Run) -> None:
    shipped = sorted(path.stem for path in (ROOT / "workflows" / "recipes").glob("*.yaml"))
    assert "tiny" in shipped
    assert _said(run("python", "-", text=CHECK)).split() == shipped


def test_the_tiny_recipe_runs_to_its_verdict(run: Run) -> None:
    command = (
        "ebbflow run /opt/ebbflow/workflows/recipes/tiny.yaml >&2 && cat runs/tiny-*/summary.json"
    )
    assert {"before", "after", "promoted"} <= json.loads(_said(run("sh", "-c", command))).keys()
