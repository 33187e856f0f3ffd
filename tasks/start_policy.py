"""The policy that training starts from."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from ebbflow.recipe import Recipe
from tasks.files import fetch, scratch
from tasks.resources import light
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(**light())
def start_policy(recipe: Recipe, base: BaseModelArtifact) -> TrainedPolicy:
    """The policy folder of the untouched base model, version 0."""
    from ebbflow.artifacts import verify
    from ebbflow.training.policy import write_base_policy

    folder = scratch("policy")
    digest = verify(fetch(base.folder))
    write_base_policy(folder, digest, recipe.digest, recipe.policy, recipe.model, recipe.evaluation.steps)
    return TrainedPolicy(folder=FlyteDirectory(str(folder)))
