"""Runs the pipeline as a user does: ``pyflyte run`` in a process of its own (tests/forked.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forked import run_forked

ROOT = Path(__file__).parents[2]
PYFLYTE = Path(sys.executable).with_name("pyflyte")


def run_pipeline(
    folder: Path,
    changes: dict[str, Any],
    recipe: str = "tiny",
    watch: Callable[[int], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``pyflyte run`` on a shipped recipe with some keys changed; everything it writes goes below
    ``folder``.
    """
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / f"{recipe}.yaml").read_text())
    written = folder / "recipe.yaml"
    written.write_text(yaml.safe_dump(settings | {"output": str(folder / "runs")} | changes))
    (folder / "tmp").mkdir(exist_ok=True)
    cache = {"FLYTE_LOCAL_CACHE_ENABLED": "true", "EBBFLOW_LOCAL_CACHE": str(folder / "cache")}
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "HOME": str(folder)} | cache
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [
        str(PYFLYTE),
        "run",
        "workflows/post_training.py",
        "post_train",
        "--recipe",
        str(written),
    ]
    return run_forked(command, cwd=ROOT, env=environment, timeout=900, watch=watch)


def package(
    folder: Path, image: str = "ebbflow:test", deployment: str = "", recipe: str = ""
) -> Path:
    """What ``pyflyte package`` makes of the workflows, as an archive.

    Args:
        deployment: the deployment itself, as JSON.
        recipe: the file of the recipe of the schedule ``nightly``; without it there is none.
    """
    archive = folder / "flyte.tgz"
    options = ["--image", image, "--source", ".", "--output", str(archive), "--force"]
    command = [str(PYFLYTE), "--pkgs", "workflows", "package", *options]
    variables = {"EBBFLOW_DEPLOYMENT": deployment, "EBBFLOW_RECIPE": recipe}
    environment = os.environ | {name: value for name, value in variables.items() if value}
    done = run_forked(command, cwd=ROOT, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return archive


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose runs share Flyte's cache and one MLflow store; a new one for every file, so
    that their order is free.
    """
    return tmp_path_factory.mktemp("pipeline")
