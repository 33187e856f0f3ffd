"""Start training from an earlier policy or from a published LoRA, which may have to be
downloaded."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch, fetch_folder, node_output
from tasks.resources import downloader
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **downloader())
def import_policy(recipe: Recipe, run: TrackedRun, base: BaseModelArtifact) -> TrainedPolicy:
    """The policy folder (version 0) of what ``policy.start`` names."""
    from ebbflow.models.hub import pretrained_folder
    from ebbflow.tracking.child_run import node_run
    from ebbflow.training.start import write_start

    start = recipe.policy.start
    folder = node_output(run, "start", "policy")
    assert start
    assert start.path
    with node_run(run, "start"):
        if start.on_hub:
            source = pretrained_folder(start, ["*.safetensors"])
        else:
            source = (
                fetch(FlyteFile(start.path))
                if start.path.endswith(".safetensors")
                else fetch_folder(start.path)
            )
        write_start(recipe, fetch(base.folder), source, folder)
    return TrainedPolicy(folder=FlyteDirectory(str(folder)))
