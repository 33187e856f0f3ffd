"""A stage kind of a user's own: a function that reads a policy folder and leaves one behind."""

from __future__ import annotations

from typing import Protocol

import torch

from ebbflow.compute import log_device
from ebbflow.data.records import StageRecord
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.plugins import import_object
from ebbflow.recipe.stages import CustomStageConfig
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.training.policy_metadata import read_policy_metadata


class TrainStage(Protocol):
    """What the ``path`` of a ``custom`` stage leads to."""

    def __call__(
        self, ctx: StageContext, folders: StageFolders, recorder: MetricsRecorder
    ) -> StageRecord:
        """Train ``folders.policy`` and leave the result at ``folders.output``;
        ``ctx.config.options`` are the user's keys.
        """


def train_custom_folder(
    ctx: StageContext, folders: StageFolders, recorder: MetricsRecorder
) -> StageRecord:
    """Run a custom stage.

    Raises:
        RecipeError: its path cannot be imported, or what it leads to returns no record.
        ArtifactError, PolicyError: it left no whole policy folder.
    """
    assert isinstance(ctx.config, CustomStageConfig)
    train: TrainStage = import_object(ctx.config.path)
    record = train(ctx, folders, recorder)
    # After the stage, which chooses the GPU and how kernels are set up, and not at all where it did
    # not use CUDA: asking for the GPU's name would start it.
    if torch.cuda.is_initialized() or not torch.cuda.is_available():
        recorder.log_tags(log_device())
    if not isinstance(record, StageRecord):
        raise RecipeError(
            f"{ctx.config.path} returned {type(record).__name__}; return a StageRecord"
            " (ebbflow.data.records)"
        )
    read_policy_metadata(folders.output)
    return record
