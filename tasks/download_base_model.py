"""Downloads a base model; cached, because a commit never changes. The one task that talks to the Hugging Face hub for it."""

from __future__ import annotations

import time

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from ebbflow.data.records import TrackedRun
from tasks.cache import once_for_all_runs
from tasks.files import scratch
from tasks.resources import downloader
from tasks.types import BaseModelArtifact


@task(cache=once_for_all_runs(), **downloader())
def download_base_model(repository: str, revision: str, run: TrackedRun) -> BaseModelArtifact:
    """A committed copy of the pipeline in ``repository`` at the commit ``revision``."""
    from ebbflow.models.prepare import download_base
    from ebbflow.tracking.child_run import node_run

    started, folder = time.time(), scratch("base")
    with node_run(run, "base model"):
        download_base(repository, revision, folder)
    return BaseModelArtifact(folder=FlyteDirectory(str(folder)), seconds=time.time() - started, finished_at=time.time())
