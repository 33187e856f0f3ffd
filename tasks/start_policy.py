"""Start training from the base model."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import light_resources
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def start_policy(recipe: Recipe, run: TrackedRun, base: BaseModelArtifact) -> TrainedPolicy:
    """Write the policy folder (version 0) of the base model."""
    from ebbflow.storage.artifacts import verify_folder
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.training.policy_metadata import write_base_policy

    folder = make_node_output(run, "start", "policy")
    with open_node_run(run, "start"):
        digest = verify_folder(fetch_artifact(base.folder))
        write_base_policy(
            folder, digest, recipe.digest, recipe.policy, recipe.model, recipe.evaluation
        )
    return TrainedPolicy(folder=FlyteDirectory(str(folder)))
