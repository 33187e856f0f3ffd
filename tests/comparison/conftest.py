"""The MLflow store of these tests."""

from tests.store_fixtures import *  # noqa: F403
