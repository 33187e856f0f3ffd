"""What earlier versions of Ebbflow wrote goes on: their runs are listed, their versions verified,
compared with and rolled back to, and their checkpoints resumed, or refused with a line.

CONTRIBUTING.md says how a sample is added.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import uuid
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ebbflow.recipe import Recipe
from ebbflow.registry.download import download_champion_folders
from ebbflow.registry.lookup import find_champion
from ebbflow.registry.promotion import roll_back_champion
from ebbflow.run_list import list_runs
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.formats import CHECKPOINT_FORMAT, RUN_FORMAT, VERSION_FORMAT
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri
from ebbflow.training.checkpoint import CheckpointError, Checkpoints
from ebbflow.training.policy_metadata import read_policy_metadata
from ebbflow.verification.checks import verify_version
from tests.released.write_samples import RECIPE

SAMPLES = {
    file.name.removesuffix(".tar.xz"): file
    for file in sorted(Path(__file__).parent.glob("*.tar.xz"))
}


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unpacked sample of a format; the folder has its name."""
    with tarfile.open(SAMPLES[request.param]) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


def test_every_format_has_a_sample() -> None:
    newest = max(RUN_FORMAT, VERSION_FORMAT, CHECKPOINT_FORMAT)
    expected = ["before_formats", *(f"format_{number + 1}" for number in range(newest))]
    assert list(SAMPLES) == expected


def test_runs_are_listed(sample: Path) -> None:
    runs = {run.recipe: run for run in list_runs(sample / "runs")}
    assert runs["finished"].state == "finished"
    assert runs["finished"].verdict == "promoted, version 1"
    assert runs["finished"].reward == (0.1, 0.2)
    assert runs["stopped"].state == "stopped in 1.1 online"


def test_a_checkpoint_is_resumed_or_refused_with_the_way_out(sample: Path) -> None:
    # The recipe as its user wrote it: a default that changed since makes no other training of it.
    recipe = Recipe.model_validate({**RECIPE, "name": "finished"})
    checkpoints = Checkpoints(StageContext(recipe, 0, 0), sample / "checkpoint")
    if sample.name == f"format_{CHECKPOINT_FORMAT}":
        newest = checkpoints.find_newest()
        assert newest is not None
        assert newest[1] == {"step": 7}
    else:
        with pytest.raises(CheckpointError) as raised:
            checkpoints.find_newest()
        (line,) = str(raised.value).splitlines()
        assert "step-00007 is of an earlier Ebbflow" in line
        assert "remove it to train the stage from its start" in line


@pytest.fixture
def version(sample: Path, tmp_path: Path) -> tuple[str, str, MlflowClient]:
    """The sample's version in a store of its own: the store's address, the model's name."""
    recipe = Recipe.model_validate({"output": str(tmp_path / "runs")})
    uri = resolve_tracking_uri(recipe)
    client = connect_to_store(uri)
    name = f"released-{uuid.uuid4().hex[:8]}"
    tags = json.loads((sample / "version.json").read_text())
    client.create_registered_model(name)
    for number in ("1", "2"):
        copy = tmp_path / f"version-{number}"
        shutil.copytree(sample / "version", copy)
        client.create_model_version(name, copy.as_uri(), None, tags)
    client.set_registered_model_alias(name, "champion", "2")
    client.set_registered_model_alias(name, "previous", "1")
    return uri, name, client


def test_a_version_verifies(version: tuple[str, str, MlflowClient]) -> None:
    uri, name, _ = version
    _, checks = verify_version(uri, f"{name}/1", again=False)
    failed = [check for check in checks if check.status == "FAILED"]
    assert failed == []
    assert {check.name for check in checks if check.status == "ok"} >= {"gate", "alias", "policy"}


def test_a_version_is_what_a_run_compares_with(
    version: tuple[str, str, MlflowClient], tmp_path: Path
) -> None:
    uri, name, _ = version
    champion = find_champion(uri, name)
    assert champion is not None
    assert champion.version == "2"
    base, policy = download_champion_folders(champion, tmp_path / "downloaded", tmp_path / "none")
    assert verify_folder(base) == champion.base_digest
    assert read_policy_metadata(policy).version == 7


def test_a_version_is_rolled_back_to(version: tuple[str, str, MlflowClient]) -> None:
    uri, name, client = version
    assert roll_back_champion(uri, name).version == "1"
    assert str(client.get_model_version_by_alias(name, "champion").version) == "1"
