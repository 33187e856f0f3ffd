"""Fixtures of the tests that need an MLflow store: one SQLite file for all tests of a folder, as
MLflow takes seconds to make one. The conftest of a folder imports them.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.training.policy_metadata import PolicyMetadata

__all__ = ["few_sources", "name", "policy", "recipe", "store"]
SOURCES = ("__init__.py", "formatting.py", "registry/__init__.py", "registry/serving.py")
"""Of Ebbflow's, those that tests change or import."""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder that already holds an MLflow store."""
    output = tmp_path_factory.mktemp("output")
    start_run(Recipe(name="first", output=str(output)), None)
    return output


@pytest.fixture(scope="module")
def few_sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stores a few of Ebbflow's sources with each version instead of the whole library, whose
    hundreds of files are copied three times and hashed twice by a test. That a version has all of
    them is tested in tests/registry/test_serving.py.
    """
    from ebbflow.registry import model_version

    library = tmp_path_factory.mktemp("sources") / "ebbflow"
    for source in SOURCES:
        (library / source).parent.mkdir(exist_ok=True)
        shutil.copyfile(model_version.LIBRARY / source, library / source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_version, "LIBRARY", library)
        yield


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
