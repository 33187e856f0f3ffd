r"""Supervised fine-tuning on the best samples of every group (rejection sampling): L = mean((v - u)^2), u = eps - x0."""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, flow_matching_error
from ebbflow.recipe.algorithms import SFTConfig


def loss(rows: ForwardRows, config: SFTConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    return flow_matching_error(rows, rows.velocity), {}


ALGORITHM = Algorithm(SFTConfig, loss, select=grouping.best)
