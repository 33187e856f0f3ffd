"""The pipeline on Flyte 2, on this machine: flyte-migrate translates the same files
(docs/flyte2.md).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from flytekit import PythonFunctionTask, Resources

from tasks import flyte2
from tasks.elastic import EveryGpu
from tasks.generate_rollouts import generate_rollouts
from tasks.resources import training_group_resources
from tasks.score_rollouts import score_rollouts

ROOT = Path(__file__).parents[2]
COMMAND = "EBBFLOW_PYFLYTE_MIGRATE"
Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(workflow)``: what the command prints as it runs the recipe ``tiny``; all that it writes
    is below a folder.
    """
    if COMMAND not in os.environ:
        pytest.skip(
            f"{COMMAND} is not set: docs/flyte2.md says how to make an environment with"
            " flyte-migrate and run this test"
        )
    recipe = tmp_path / "recipe.yaml"
    tiny = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text())
    recipe.write_text(yaml.safe_dump(tiny | {"output": str(tmp_path / "runs")}))
    own = {
        "HOME": str(tmp_path),
        "EBBFLOW_LOCAL_CACHE": str(tmp_path / "cache"),
        "FLYTE_DISABLE_TELEMETRY": "true",
    }
    environment = {
        name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"
    } | own

    def started(workflow: str) -> str:
        command = [
            os.environ[COMMAND],
            "run",
            "workflows/post_training.py",
            workflow,
            "--recipe",
            str(recipe),
        ]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return started


def test_flyte_migrate_is_told_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With flytekit alone, limits are requests."""
    one = Resources(cpu="2", mem="4Gi", gpu="1", ephemeral_storage="10Gi")
    monkeypatch.setattr(flyte2, "PLUGINS", None)
    assert flyte2.build_limits(one) == one
    known: dict[str, str] = {}
    plugins = SimpleNamespace(
        register_plugin=known.__setitem__, _transform_pytorch_config_v1_to_v2="Elastic's"
    )
    monkeypatch.setattr(flyte2, "PLUGINS", plugins)
    assert flyte2.build_limits(one) == Resources(cpu="2", mem="4Gi", gpu="1")
    flyte2.register_elastic_translation()
    training_group = type(training_group_resources()["task_config"])
    assert known == {training_group.__name__: "Elastic's", EveryGpu.__name__: "Elastic's"}


@pytest.mark.parametrize(
    ("task", "mapped"), [(generate_rollouts, "shard"), (score_rollouts, "rollouts")]
)
def test_a_mapped_input_comes_first(task: PythonFunctionTask, mapped: str) -> None:
    """Flyte 2 passes it by its position, before all others."""
    assert next(iter(task.python_interface.inputs)) == mapped


def test_the_dry_run_is_printed(run: Run) -> None:
    assert re.search(
        r"offline training: 0\.0 GiB of main memory, training_group: fits", run("dry_run")
    )


def test_the_pipeline_runs_to_its_verdict(run: Run, tmp_path: Path) -> None:
    run("post_train")
    (summary,) = (tmp_path / "runs").glob("*/summary.json")
    assert {"before", "after", "promoted"} <= json.loads(summary.read_text()).keys()
