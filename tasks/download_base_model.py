"""Downloads a base model; cached, because a commit never changes. The one task that talks to the Hugging Face hub for it."""

from __future__ import annotations

import time

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from tasks.files import scratch
from tasks.resources import downloader
from tasks.types import BaseModelArtifact


@task(cache=Cache(version="1", serialize=True), **downloader())
def download_base_model(repository: str, revision: str) -> BaseModelArtifact:
    """A committed copy of the pipeline in ``repository`` at the commit ``revision``."""
    from ebbflow.models.prepare import download_base

    started, folder = time.time(), scratch("base")
    download_base(repository, revision, folder)
    return BaseModelArtifact(folder=FlyteDirectory(str(folder)), seconds=time.time() - started, finished_at=time.time())
