"""Runs whose only stage trains on captioned pictures: the second takes the latents of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ebbflow.models.glyph_training.pictures import write_pictures
from tests.glyph_stages import small_stage
from tests.pipeline.conftest import run_pipeline

SMALL = {
    "model": {"training": {"steps": 3, "batch": 4}},
    # An OCR that reads all evaluations would be most of the run.
    "guardrails": [],
    "evaluation": {"steps": 3, "samples": 1},
}


@pytest.mark.exhaustive
def test_stages_train_on_pictures_that_are_encoded_once(workplace: Path) -> None:
    pictures = workplace / "pictures"
    write_pictures(pictures, count=24, seed=3)
    tags = []
    for epochs in (1, 2):
        before = set((workplace / "runs").glob("*/summary.json"))
        stage = {
            "kind": "offline",
            "algorithm": {"name": "sft", "noise_levels": 1},
            "sampler": {"name": "ode", "steps": 1000},
            "data": {"path": str(pictures)},
            "micro_batch": 8,
            "batch_size": 8,
            "epochs": epochs,
        }
        done = run_pipeline(
            workplace,
            SMALL | {"stages": [small_stage(stage)], "promotion": {"model_name": "tiny-data"}},
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "pictures: pictures: 24; left out: on prompts of the evaluation 0" in done.stderr
        (path,) = set((workplace / "runs").glob("*/summary.json")) - before
        summary = json.loads(path.read_text())
        assert f"offline sft on {pictures}" in (path.parent / "report.html").read_text()
        uri = f"sqlite:///{workplace}/runs/mlflow.db"
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment = client.get_run(summary["mlflow_run_id"]).info.experiment_id
        children = client.search_runs(
            [experiment], f"tags.`mlflow.parentRunId` = '{summary['mlflow_run_id']}'"
        )
        nodes = {child.info.run_name: child for child in children}
        # Only the first run encodes.
        assert ("1.1 offline latents" in nodes) == (epochs == 1)
        assert nodes["1.1 offline data"].data.metrics == {
            "pictures": 24,
            "on_evaluated_prompts": 0,
            "files_without_row": 0,
        }
        (dataset,) = nodes["1.1 offline data"].inputs.dataset_inputs
        assert dataset.dataset.name == "data"
        assert nodes["1.1 offline"].data.params["samples"] == "24"
        tags.append(nodes["1.1 offline data"].data.tags["encoding_digest"])
    assert tags[0] == tags[1]
