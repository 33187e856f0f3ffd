"""Download a base model from the Hugging Face hub; cached for all runs, because a commit never
changes.
"""

from __future__ import annotations

import time

from flytekit import task

from ebbflow.data.records import TrackedRun
from tasks.cache import cache_for_all_runs
from tasks.files import make_scratch_path, mark_node_started
from tasks.resources import downloader_resources
from tasks.types import BaseModelArtifact


@task(cache=cache_for_all_runs(BaseModelArtifact), **downloader_resources())
def download_base_model(repository: str, revision: str, run: TrackedRun) -> BaseModelArtifact:
    """Make a committed copy of the pipeline in ``repository`` at commit ``revision``."""
    from ebbflow.models.prepare import download_base_folder
    from ebbflow.tracking.child_run import open_node_run

    started = time.time()
    # Not in the run's folder: the cache outlives the run, whose folder may be deleted.
    folder = make_scratch_path("base")
    mark_node_started(run, "base model")
    with open_node_run(run, "base model"):
        download_base_folder(repository, revision, folder)
    return BaseModelArtifact.from_new_folder(folder, started)
