"""Trains the glyph base model from scratch; cached, so a recipe pays for it once."""

from __future__ import annotations

import time

from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from ebbflow.recipe.model import GlyphTraining
from tasks.files import scratch
from tasks.resources import accelerated
from tasks.types import BaseModelArtifact


@task(cache=Cache(version="1", serialize=True), **accelerated())
def train_base_model(training: GlyphTraining, threads: int) -> BaseModelArtifact:
    """A committed base-model folder in the Hugging Face layout."""
    from ebbflow.models.prepare import train_base

    started, folder = time.time(), scratch("base")
    train_base(training, threads, folder)
    return BaseModelArtifact(folder=FlyteDirectory(str(folder)), seconds=time.time() - started, finished_at=time.time())
