r"""REINFORCE: the plain policy gradient, L = -w A log_prob, with w = 1 above the group's mean and
``negatives`` below it.

Without a ratio there is nothing to clip, and samples are good for one update only: set
``updates_per_step: 1``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows
from ebbflow.recipe.algorithms import TrajectoryConfig


class ReinforceConfig(TrajectoryConfig):
    """Policy gradient without a ratio and without a clip."""

    stage_defaults: ClassVar = {
        "sampler": {"name": "flow_sde"},
        "window": {"kind": "random", "size": 2},
    }

    negatives: float = Field(1.0, ge=0, le=1)
    """Weight of the samples below their group's mean; 0 learns from the good ones alone."""


def loss(rows: TrajectoryRows, config: ReinforceConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each term, [M]."""
    weight = torch.where(rows.advantage > 0, 1.0, config.negatives)
    return -weight * rows.advantage * rows.log_prob, {"reinforce/log_prob": rows.log_prob}


ALGORITHM = Algorithm(ReinforceConfig, loss)
