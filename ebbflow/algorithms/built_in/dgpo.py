r"""DGPO (2510.08425): direct preference between the better and the worse part of a whole group.

    d   = mean((v - u)^2),   u = eps - x0
    S_g = (1 / K) sum over the group of A beta (sg d - d_ref)
    L   = mean[sg sigmoid(S_g) A d]

sigma and eps are shared inside a group. What a group still has to gain, sigmoid(S_g), weighs its rows; the sampler may be
deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, flow_matching_error, group_mean
from ebbflow.recipe.algorithms import ForwardConfig, SigmaConfig

if TYPE_CHECKING:
    from torch import Tensor


class DGPOConfig(ForwardConfig):
    """Group preference: the whole group decides how much each of its samples still has to gain."""

    paper: ClassVar = "2510.08425"

    name: Literal["dgpo"] = "dgpo"
    beta: float = Field(50.0, gt=0)
    """Strength of the preference, on errors that are means over the latent's elements."""
    sigma: SigmaConfig = SigmaConfig(kind="schedule", min=0.79, stratified=False)
    """Published: high noise only, for GenEval the first 5 of 10 steps with shift 3, for OCR the first 7 (``min: .6``)."""


def loss(rows: ForwardRows, config: DGPOConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    error = flow_matching_error(rows, rows.velocity)
    change = error.detach() - flow_matching_error(rows, rows.copies["reference"])
    weight = group_mean(rows.advantage * config.beta * change, rows.group_index).sigmoid()
    return weight * rows.advantage * error, {"dgpo/weight": weight, "dgpo/change": change}


ALGORITHM = Algorithm(DGPOConfig, loss, copies=lambda config: frozenset({"reference"}), select=grouping.groups)
