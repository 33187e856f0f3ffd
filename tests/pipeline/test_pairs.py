"""A run whose only stage trains on a file of preference pairs: nothing is generated for it and
nothing scored.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from ebbflow.data.images import encode_pngs
from ebbflow.models.glyph_training.lettering import render_text
from tests.glyph_stages import small_stage
from tests.pipeline.conftest import run_pipeline

WORDS = ("GATE", "LAMP", "MOON", "RIVE", "SALT", "TUNE", "VASE", "WOLF", "YARN")


def _picture(text: str) -> bytes:
    return encode_pngs(np.repeat(render_text(text, 16, 32)[None, ..., None], 3, axis=3))[0]


def _write_pairs(path: Path) -> None:
    rows = [
        {
            "prompt": f'"{word}"',
            "chosen": _picture(word),
            "rejected": _picture(word[::-1]),
            "by": "me",
        }
        for word in WORDS
    ]
    rows.append(rows[0] | {"rejected": rows[0]["chosen"]})
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.exhaustive
def test_a_stage_trains_on_a_file_of_pairs(workplace: Path) -> None:
    pairs = workplace / "pairs.parquet"
    _write_pairs(pairs)
    before = set((workplace / "runs").glob("*/summary.json"))
    stage = {
        "kind": "offline",
        "algorithm": {"name": "diffusion_dpo"},
        "pairs": str(pairs),
        "micro_batch": 8,
        "batch_size": 8,
        "epochs": 2,
    }
    done = run_pipeline(
        workplace, {"stages": [small_stage(stage)], "promotion": {"model_name": "tiny-pairs"}}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (
        "pairs.parquet: pairs to train on: 9; left out: ties 1, on prompts of the evaluation 0;"
        " ignored columns: by" in done.stderr
    )
    (path,) = set((workplace / "runs").glob("*/summary.json")) - before
    summary = json.loads(path.read_text())
    assert summary["seconds"]["1.1 offline"] > 0
    assert "1.1 offline" in (path.parent / "report.html").read_text()

    uri = f"sqlite:///{workplace}/runs/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_run(summary["mlflow_run_id"]).info.experiment_id
    children = client.search_runs(
        [experiment], f"tags.`mlflow.parentRunId` = '{summary['mlflow_run_id']}'"
    )
    nodes = {child.info.run_name: child for child in children}
    assert {name for name in nodes if name.startswith("1.1")} == {
        "1.1 offline pairs",
        "1.1 offline",
        "1.1 offline evaluation",
    }
    assert nodes["1.1 offline pairs"].data.metrics == {
        "pairs": 9,
        "ties": 1,
        "on_evaluated_prompts": 0,
    }
    (dataset,) = nodes["1.1 offline pairs"].inputs.dataset_inputs
    assert dataset.dataset.name == "pairs"
    assert nodes["1.1 offline"].data.params["samples"] == "18"
    assert {"loss", "dpo/margin"} <= set(nodes["1.1 offline"].data.metrics)
