"""Fixtures of the tests that need an MLflow store: one SQLite file for all tests of a folder, as
MLflow takes seconds to make one. The conftest of a folder imports them.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.training.policy_metadata import PolicyMetadata

__all__ = ["name", "policy", "recipe", "store"]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder that already holds an MLflow store."""
    output = tmp_path_factory.mktemp("output")
    start_run(Recipe(name="first", output=str(output)), None)
    return output


@pytest.fixture
def recipe(store: Path) -> Recipe:
    return Recipe(output=str(store))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A committed policy folder, with weights that nobody loads."""
    folder = tmp_path / "some-policy"
    metadata = PolicyMetadata(
        base_digest="b" * 64, recipe_digest="r" * 64, config=PolicyConfig(), version=7
    )
    with write_new_folder(folder) as unfinished:
        (unfinished / "policy.json").write_text(metadata.model_dump_json())
        (unfinished / "weights.safetensors").write_bytes(b"\0" * 64)
    return folder


@pytest.fixture
def name() -> str:
    """Of a registered model that no other test has."""
    return f"model-{uuid.uuid4().hex[:8]}"
