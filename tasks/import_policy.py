"""Start training from an earlier policy, from the champion, or from a published LoRA, which may
have to be downloaded.
"""

from __future__ import annotations

from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.pretrained import PretrainedSourceConfig
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, fetch_folder, make_node_output
from tasks.resources import downloader_resources
from tasks.types import BaseModelArtifact, TrainedPolicy


@task(cache=ONCE_PER_RUN, **downloader_resources())
def import_policy(recipe: Recipe, run: TrackedRun, base: BaseModelArtifact) -> TrainedPolicy:
    """Write the policy folder (version 0) of what ``policy.start`` names."""
    from ebbflow.registry.download import download_champion
    from ebbflow.registry.lookup import find_champion
    from ebbflow.storage.artifacts import verify_folder
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.training.policy_metadata import write_base_policy
    from ebbflow.training.start import write_start_policy

    start = recipe.policy.start
    assert start
    folder = make_node_output(run, "start", "policy")
    base_folder = fetch_artifact(base.folder)
    with open_node_run(run, "start") as run_logger:
        if isinstance(start, PretrainedSourceConfig):
            source = _fetch_source(start)
            write_start_policy(recipe, base_folder, source, folder, start.path)
            return TrainedPolicy(folder=FlyteDirectory(str(folder)), was_trained=True)
        champion = find_champion(run.tracking_uri, recipe.promotion.model_name)
        if champion is None:
            digest = verify_folder(base_folder)
            write_base_policy(
                folder, digest, recipe.digest, recipe.policy, recipe.model, recipe.evaluation
            )
            name = "the base model, as there is no champion"
        else:
            downloaded = make_node_output(run, "start", "champion")
            source = download_champion(champion, downloaded) / "policy"
            name = f"models:/{champion.model_name}/{champion.version}"
            write_start_policy(recipe, base_folder, source, folder, name)
        run_logger.log_params({"start": name})
    return TrainedPolicy(folder=FlyteDirectory(str(folder)), was_trained=champion is not None)


def _fetch_source(start: PretrainedSourceConfig) -> Path:
    """Fetch a policy folder, or a LoRA, which is a folder or one file."""
    from ebbflow.models.hub import locate_pretrained

    assert start.path
    if start.is_on_hub:
        return locate_pretrained(start, ["*.safetensors"])
    if start.path.endswith(".safetensors"):
        return fetch_artifact(FlyteFile(start.path))  # a published LoRA is one file
    return fetch_folder(start.path)
