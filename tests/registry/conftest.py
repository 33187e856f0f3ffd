"""The MLflow store of these tests, and models in it."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ebbflow.recipe import Recipe
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri
from tests.store_fixtures import *  # noqa: F403


@pytest.fixture
def uri(recipe: Recipe) -> str:
    return resolve_tracking_uri(recipe)


@pytest.fixture
def client(uri: str) -> MlflowClient:
    return connect_to_store(uri)


@pytest.fixture
def model(client: MlflowClient) -> Callable[..., str]:
    """``model(3, champion=2, previous=1)``: a registered model with so many versions, which are
    names without files.
    """

    def make(versions: int, **aliases: int) -> str:
        name = f"model-{uuid.uuid4().hex[:8]}"
        client.create_registered_model(name)
        for _ in range(versions):
            client.create_model_version(name, "file:///nowhere", tags={"ebbflow.run_id": "a run"})
        for alias, version in aliases.items():
            client.set_registered_model_alias(name, alias, str(version))
        return name

    return make


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder that passes for a base model where nobody loads it."""
    folder = tmp_path / "some-base"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    return folder
