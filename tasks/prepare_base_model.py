"""The base model: the one task that trains or copies it; cached, so a recipe pays for it once."""

from __future__ import annotations

import time

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from ebbflow.recipe.recipe import Model
from tasks.files import fetch, scratch
from tasks.resources import accelerated
from tasks.types import BaseModelArtifact


@task(cache=Cache(version="1", serialize=True), **accelerated())
def prepare_base_model(model: Model, threads: int) -> BaseModelArtifact:
    """A committed base-model folder in the Hugging Face layout."""
    from ebbflow.models.prepare import copy_base, train_base

    started, folder = time.time(), scratch("base")
    if model.path is None:
        train_base(model, threads, folder)
    else:
        copy_base(fetch(FlyteDirectory(model.path)), folder)
    return BaseModelArtifact(folder=FlyteDirectory(str(folder)), seconds=time.time() - started, finished_at=time.time())
