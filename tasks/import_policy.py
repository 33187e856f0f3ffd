"""Start training from an earlier policy or from a published LoRA, which may have to be
downloaded."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, fetch_folder, make_node_output
from tasks.resources import downloader_resources
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **downloader_resources())
def import_policy(recipe: Recipe, run: TrackedRun, base: BaseModelArtifact) -> TrainedPolicy:
    """Write the policy folder (version 0) of what ``policy.start`` names."""
    from ebbflow.models.hub import locate_pretrained
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.training.start import write_start_policy

    start = recipe.policy.start
    folder = make_node_output(run, "start", "policy")
    assert start
    assert start.path
    with open_node_run(run, "start"):
        if start.is_on_hub:
            source = locate_pretrained(start, ["*.safetensors"])
        elif start.path.endswith(".safetensors"):
            source = fetch_artifact(FlyteFile(start.path))  # a published LoRA is one file
        else:
            source = fetch_folder(start.path)
        write_start_policy(recipe, fetch_artifact(base.folder), source, folder)
    return TrainedPolicy(folder=FlyteDirectory(str(folder)))
