"""A registered champion to serve."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from registry_cases import crown

from ebbflow.recipe import Recipe
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.registry import download
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.training.policy_metadata import write_base_policy


class Served(NamedTuple):
    """A registered champion: the store, its version, and the folders of MLflow's model and of the
    policy.
    """

    uri: str
    version: str
    model: Path
    base: Path
    policy: Path


def serve_base(
    name: str, model: ModelConfig, base_folder: Path, store: Path, folder: Path
) -> Served:
    """Make the policy of the untouched base model the champion of a name in a store."""
    write_base_policy(
        folder / "policy",
        verify_folder(base_folder),
        "recipe",
        PolicyConfig(),
        model,
        EvaluationConfig(steps=2),
    )
    tracked = start_run(Recipe(output=str(store)), None)
    lineage = {"base_digest": verify_folder(base_folder)}
    made = crown(
        tracked, folder / "policy", base_folder, lineage, model_name=name, expected_champion=None
    )
    downloaded = download.download_version(tracked.tracking_uri, name, made.version, folder)
    return Served(tracked.tracking_uri, made.version, downloaded, base_folder, folder / "policy")
