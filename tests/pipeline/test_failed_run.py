"""A workflow that fails outside of this code leaves no run RUNNING in MLflow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from mlflow import MlflowClient

from ebbflow.recipe import Recipe, load_recipe
from ebbflow.tracking.reconcile import ENDED_BY
from tasks.end_failed_run import end_failed_run
from tests.pipeline.conftest import ROOT, package
from tests.pipeline.pods import Cluster, PodFailed, decoded, execute
from tests.pipeline.servers import client_of, object_store, tracking_server

BUCKET = "s3://failing"


def test_a_failure_node_without_mlflow_does_not_fail_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flyte shows the error of a failure node in place of the workflow's."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    execution = SimpleNamespace(project="p", domain="d", name="a6f3")
    context = SimpleNamespace(execution_id=execution)
    monkeypatch.setattr("tasks.end_failed_run.current_context", lambda: context)
    # Port 9 is "discard": nothing listens there.
    recipe = Recipe.model_validate(
        {"output": "s3://b/runs", "tracking": {"uri": "http://127.0.0.1:9"}}
    )
    assert end_failed_run.task_function(recipe=recipe) == ""
    assert "cannot set the run FAILED in MLflow: " in caplog.text


def test_a_pod_that_never_starts_fails_the_run(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text())
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings | {"output": f"{BUCKET}/runs"}))
    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(Recipe)
    recipe = TypeEngine.to_literal(context, load_recipe(file), Recipe, kind).to_flyte_idl()
    with object_store() as store, tracking_server(tmp_path) as tracking:
        bucket = client_of(store)
        bucket.mkdir(BUCKET)
        environment = {
            **store,
            "MLFLOW_TRACKING_URI": tracking,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONPATH": str(ROOT),
        }
        cluster = Cluster(bucket, BUCKET, environment, tmp_path, broken={"tasks.prepare_prompts"})
        with pytest.raises(PodFailed, match="ImagePullBackOff"):
            execute(
                cluster,
                decoded(package(tmp_path)),
                "workflows.post_training.post_train",
                {"recipe": recipe},
                "a6f3",
            )
        client = MlflowClient(tracking, tracking)
        experiments = [one.experiment_id for one in client.search_experiments()]
        (run,) = client.search_runs(experiments)
        assert run.info.status == "FAILED"
        assert "ImagePullBackOff" in run.data.tags[ENDED_BY]
