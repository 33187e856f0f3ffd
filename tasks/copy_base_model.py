"""Copy a base model from a folder, in every run, because the content of a folder can change."""

from __future__ import annotations

import time

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.model import ModelConfig
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_folder, make_node_output
from tasks.resources import downloader_resources
from tasks.types import BaseModelArtifact


@task(cache=ONCE_PER_RUN, **downloader_resources())
def copy_base_model(model: ModelConfig, run: TrackedRun) -> BaseModelArtifact:
    """Make a committed copy of the folder at ``model.path``, a path or a URI."""
    from ebbflow.models.prepare import copy_base_folder
    from ebbflow.tracking.child_run import open_node_run

    started = time.time()
    folder = make_node_output(run, "base model", "base")
    assert model.path
    with open_node_run(run, "base model"):
        copy_base_folder(fetch_folder(model.path), folder, model)
    return BaseModelArtifact.from_new_folder(folder, started)
