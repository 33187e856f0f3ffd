"""Encode captioned data as latents; cached for all runs until a picture, the VAE, the sizes or the
code changes.
"""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import cache_for_all_runs
from tasks.files import fetch_artifact, fetch_data, make_scratch_path, mark_node_started
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact

SOURCES = (
    "offline/data.py",
    "offline/shards.py",
    "data/buckets.py",
    "data/captioned.py",
    "data/clips.py",
    "data/images.py",
    "data/parquet_files.py",
    "data/sized_pictures.py",
    "models/base.py",
    "models/families",
    "models/pipeline.py",
    "models/pipeline_loading.py",
    "models/videos.py",
)
"""What decides the bytes of the latents besides the VAE's files, which are in the digest. The
families encode pictures, each in its own way.
"""
IN_DIGEST = ("run", "recipe", "base", "round", "stage")


@task(cache=cache_for_all_runs(None, *SOURCES, ignored=IN_DIGEST), **accelerated_resources())
def encode_data(
    encoding: str, recipe: Recipe, run: TrackedRun, base: BaseModelArtifact, round: int, stage: int
) -> list[FlyteFile]:
    """Encode the pictures into shards (``rollout_schema``), some for each bucket.

    Args:
        encoding: the digest of all that the latents depend on.
    """
    from ebbflow.compute import require_requested_gpus
    from ebbflow.offline.data import encode_data_from_folder
    from ebbflow.stage import StageContext
    from ebbflow.tracking.child_run import open_node_run

    require_requested_gpus()
    ctx = StageContext(recipe, round, stage)
    config = ctx.config.captioned_data
    assert config
    node = f"{ctx.stage_label} latents"
    mark_node_started(run, node)
    with open_node_run(run, node) as run_logger:
        shards = encode_data_from_folder(
            ctx,
            config,
            fetch_artifact(base.folder),
            fetch_data(config.path),
            encoding,
            # Not in the run's folder: the cache outlives the run, whose folder may be deleted.
            make_scratch_path("latents"),
        )
        run_logger.log_metrics({"shards": len(shards)}, step=0)
    return [FlyteFile(str(shard)) for shard in shards]
