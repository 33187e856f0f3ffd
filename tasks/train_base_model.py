"""Train the glyph base model from scratch; cached for all runs until the code that trains it
changes.
"""

from __future__ import annotations

import time

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.model import GlyphTrainingConfig
from tasks.cache import shared_by_all_runs
from tasks.files import scratch
from tasks.resources import accelerated
from tasks.types import BaseModelArtifact

SOURCES = (
    "models/families/glyph.py",
    "models/glyph_training/train.py",
    "models/glyph_training/lettering.py",
)


@task(cache=shared_by_all_runs(*SOURCES), **accelerated())
def train_base_model(
    training: GlyphTrainingConfig, threads: int, run: TrackedRun
) -> BaseModelArtifact:
    """A committed base-model folder in the Hugging Face layout."""
    from ebbflow.models.prepare import train_base
    from ebbflow.tracking.child_run import node_run

    started = time.time()
    folder = scratch("base")
    with node_run(run, "base model"):
        train_base(training, threads, folder)
    return BaseModelArtifact.made(folder, started)
