"""Train the glyph base model from scratch, unless the one that comes with the package was trained
like that; cached for all runs until the code that trains it changes.
"""

from __future__ import annotations

import time

from flytekit import task

from ebbflow.data.records import TrackedRun
from ebbflow.recipe.model import GlyphTrainingConfig
from tasks.cache import cache_for_all_runs
from tasks.files import make_scratch_path, mark_node_started
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact

# The cache covers these files. Others, such as the trainer of policies, change no byte of the
# model.
SOURCES = (
    "models/families/glyph.py",
    "models/glyph_training/train.py",
    "models/glyph_training/base.safetensors",
    "models/glyph_training/lettering.py",
)


@task(cache=cache_for_all_runs(BaseModelArtifact, *SOURCES), **accelerated_resources())
def train_base_model(
    training: GlyphTrainingConfig, threads: int, run: TrackedRun
) -> BaseModelArtifact:
    """Make the glyph base model; return a committed folder in the Hugging Face layout."""
    from ebbflow.compute import require_requested_gpus
    from ebbflow.models.prepare import train_base_folder
    from ebbflow.tracking.child_run import open_node_run

    require_requested_gpus()
    started = time.time()
    # Not in the run's folder: the cache outlives the run, whose folder may be deleted.
    folder = make_scratch_path("base")
    mark_node_started(run, "base model")
    with open_node_run(run, "base model"):
        train_base_folder(training, threads, folder)
    return BaseModelArtifact.from_new_folder(folder, started)
