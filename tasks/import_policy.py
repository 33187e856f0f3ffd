"""An earlier policy, or a published LoRA, as the policy that training starts from; the LoRA may have to be downloaded."""

from __future__ import annotations

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.recipe import Recipe
from tasks.files import fetch, fetch_folder, scratch
from tasks.resources import downloader
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(**downloader())
def import_policy(recipe: Recipe, base: BaseModelArtifact) -> TrainedPolicy:
    """The policy folder, version 0, of what ``policy.start`` names."""
    from ebbflow.models.hub import pretrained_folder
    from ebbflow.training.start import write_start

    start, folder = recipe.policy.start, scratch("policy")
    assert start
    assert start.path
    if start.on_hub:
        source = pretrained_folder(start, ["*.safetensors"])
    else:
        source = fetch(FlyteFile(start.path)) if start.path.endswith(".safetensors") else fetch_folder(start.path)
    write_start(recipe, fetch(base.folder), source, folder)
    return TrainedPolicy(folder=FlyteDirectory(str(folder)))
