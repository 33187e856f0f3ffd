"""The MLflow store of these tests, and a run in it."""

import uuid

import pytest
from mlflow import MlflowClient

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.tracking.parent_run import start_run
from ebbflow.tracking.store import connect_to_store
from tests.store_fixtures import *  # noqa: F403


@pytest.fixture
def tracked(recipe: Recipe) -> TrackedRun:
    return start_run(recipe, f"execution-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def client(tracked: TrackedRun) -> MlflowClient:
    return connect_to_store(tracked.tracking_uri)
