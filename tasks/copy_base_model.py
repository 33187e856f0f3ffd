"""Copy a base model from a folder, in every run, because the content of a folder can change."""

from __future__ import annotations

import time

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.model import ModelConfig
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_folder, node_output
from tasks.resources import downloader
from tasks.types import BaseModelArtifact


@task(cache=ONCE_PER_RUN, **downloader())
def copy_base_model(model: ModelConfig, run: TrackedRun) -> BaseModelArtifact:
    """A committed copy of the folder at ``model.path``, a path or a URI."""
    from ebbflow.models.prepare import copy_base
    from ebbflow.tracking.child_run import node_run

    started = time.time()
    folder = node_output(run, "base model", "base")
    assert model.path
    with node_run(run, "base model"):
        copy_base(fetch_folder(model.path), folder, model)
    return BaseModelArtifact.made(folder, started)
