"""Download a base model from the Hugging Face hub; cached for all runs, because a commit never
changes.
"""

from __future__ import annotations

import time

from flytekit import task

from ebbflow.data.records import TrackedRun
from tasks.cache import shared_by_all_runs
from tasks.files import scratch
from tasks.resources import downloader
from tasks.types import BaseModelArtifact


@task(cache=shared_by_all_runs(), **downloader())
def download_base_model(repository: str, revision: str, run: TrackedRun) -> BaseModelArtifact:
    """A committed copy of the pipeline in ``repository`` at commit ``revision``."""
    from ebbflow.models.prepare import download_base
    from ebbflow.tracking.child_run import node_run

    started = time.time()
    folder = scratch("base")
    with node_run(run, "base model"):
        download_base(repository, revision, folder)
    return BaseModelArtifact.made(folder, started)
