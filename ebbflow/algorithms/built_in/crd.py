r"""CRD (2603.14128): regress the change against the old policy on the advantage, both centred inside the group of a prompt.

    r = -[mean((v - u)^2) / w - mean((v_old - u)^2) / w_old],   w = sg max(mean|v - u|, 1e-5),  w_old likewise,  u = eps - x0
    L = (5 / beta) mean((beta (r - mean_group r) - (A - mean_group A))^2)

sigma and eps are shared inside a group. Rollouts come from the old policy, as in DiffusionNFT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, group_mean, per_row
from ebbflow.recipe.algorithms import EmaScheduleConfig, ForwardConfig

if TYPE_CHECKING:
    from torch import Tensor


class CRDConfig(ForwardConfig):
    """Regression of the change against the old policy on the advantage, both centred inside the group."""

    paper: ClassVar = "2603.14128"
    stage_defaults: ClassVar = {"reference": {"weight": 1e-4}}

    name: Literal["crd"] = "crd"
    beta: float = Field(0.1, gt=0)
    """Scale of the implied reward."""
    old: EmaScheduleConfig = EmaScheduleConfig()


def loss(rows: ForwardRows, config: CRDConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    implied = -(_weighted_error(rows, rows.velocity) - _weighted_error(rows, rows.copies["old"]))
    target = _centred(rows.advantage, rows.group_index)
    miss = config.beta * _centred(implied, rows.group_index) - target
    return 5 / config.beta * miss**2, {"crd/implied": implied, "crd/agreement": (implied * target > 0).float()}


def _weighted_error(rows: ForwardRows, velocity: Tensor) -> Tensor:
    error = velocity - (rows.noise - rows.clean)
    return per_row(error**2) / per_row(error.detach().abs()).clamp_min(1e-5)


def _centred(values: Tensor, group_index: Tensor) -> Tensor:
    return values - group_mean(values, group_index)


ALGORITHM = Algorithm(
    CRDConfig,
    loss,
    copies=lambda config: frozenset({"old"}),
    select=grouping.groups,
    old_decay=lambda config, step: config.old.decay(step),
    generates="old",
)
