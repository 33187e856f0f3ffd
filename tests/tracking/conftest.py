"""One SQLite store for all tests of this folder: MLflow takes seconds to make one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.recipe import Recipe
from ebbflow.tracking.parent_run import start_run


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder that already holds an MLflow store."""
    output = tmp_path_factory.mktemp("output")
    start_run(Recipe(name="first", output=str(output)), None)
    return output


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def recipe(store: Path) -> Recipe:
    return Recipe(output=str(store))
