"""A base model that lies in a folder is taken over as it is now, not as it was at the first run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store
from tasks.copy_base_model import copy_base_model


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackedRun:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return start_run(Recipe(output=str(tmp_path / "runs")), None)


def test_what_lies_at_the_path_now_is_copied(
    base_folder: Path, tmp_path: Path, run: TrackedRun
) -> None:
    source = shutil.copytree(base_folder, tmp_path / "base")
    for mark in ("manifest.json", "COMMIT"):
        (source / mark).unlink(missing_ok=True)
    first = verify_folder(
        Path(copy_base_model(model=ModelConfig(path=str(source)), run=run).folder.download())
    )
    index = json.loads((source / "model_index.json").read_text())
    (source / "model_index.json").write_text(json.dumps(index | {"changed": [None, None]}))
    assert (
        verify_folder(
            Path(copy_base_model(model=ModelConfig(path=str(source)), run=run).folder.download())
        )
        != first
    )


def test_a_committed_folder_that_was_damaged_is_refused_and_the_run_fails(
    base_folder: Path, tmp_path: Path, run: TrackedRun
) -> None:
    source = shutil.copytree(base_folder, tmp_path / "base")
    assert (source / "COMMIT").is_file()
    (source / "model_index.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"does not match its manifest \(model_index.json\)"):
        copy_base_model(model=ModelConfig(path=str(source)), run=run)
    assert connect_to_store(run.tracking_uri).get_run(run.run_id).info.status == "FAILED"
