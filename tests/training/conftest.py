"""Stages that start from a policy folder."""

from __future__ import annotations

import pytest
from training_cases import FULL

from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy_metadata import write_base_policy


@pytest.fixture
def ctx(make_recipe):
    def of(config=FULL, online=None, **rest):
        return StageContext(
            make_recipe(
                online=online or {"algorithm": {"name": "sft"}}, policy=config.model_dump(), **rest
            ),
            0,
            0,
        )

    return of


@pytest.fixture
def start(base_folder, tmp_path):
    """The folder of the untouched base, for a kind of policy."""

    def of(config):
        write_base_policy(tmp_path / "start", verify_folder(base_folder), "recipe", config)
        return tmp_path / "start"

    return of
