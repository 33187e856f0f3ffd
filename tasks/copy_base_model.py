"""Takes over a base model from a folder, anew in every run, because what lies at a path can change."""

from __future__ import annotations

import time

from flytekit import task
from flytekit.types.directory import FlyteDirectory

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.model import Model
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_folder, scratch
from tasks.resources import accelerated
from tasks.types import BaseModelArtifact


@task(cache=ONCE_PER_RUN, **accelerated())
def copy_base_model(model: Model, run: TrackedRun) -> BaseModelArtifact:
    """A committed copy of the folder (or URI) that the recipe's model section names."""
    from ebbflow.models.prepare import copy_base
    from ebbflow.tracking.child_run import node_run

    started, folder = time.time(), scratch("base", run)
    assert model.path
    with node_run(run, "base model"):
        copy_base(fetch_folder(model.path), folder, model)
    return BaseModelArtifact(folder=FlyteDirectory(str(folder)), seconds=time.time() - started, finished_at=time.time())
