r"""Reward-weighted regression (2302.12192): flow matching on every sample, with a weight.

    L = mean[exp(A / temperature) mean((v - u)^2)],   u = eps - x0

Every sample is imitated, the better the more. The advantage, centred in its group and clamped,
stands in for the raw reward, so that hard prompts count as much as easy ones.

Deviations: the paper weighs with the reward itself, not with its exponential, and adds the
pretraining loss on real images, which the stage's ``reference`` stands in for if it has a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, compute_flow_matching_error
from ebbflow.algorithms.imitation import ImitationConfig
from ebbflow.recipe.algorithms import PublishedSetting

if TYPE_CHECKING:
    from torch import Tensor


class RWRConfig(ImitationConfig):
    """Flow matching on every sample, weighted with exp(advantage / temperature)."""

    paper: ClassVar = "2302.12192"
    published: ClassVar = {
        "algorithm.temperature": PublishedSetting(
            "none",
            "2302.12192",
            "the same in yifan123/flow_grpo flow_grpo/stat_tracking.py, type rwr",
            deviation=(
                "published weights are the rewards themselves, which must not be negative; exp(A /"
                " temperature) takes any"
            ),
        ),
        **ImitationConfig.published,
    }

    name: Literal["rwr"] = "rwr"
    temperature: float = Field(1.0, gt=0)


def compute_loss(rows: ForwardRows, config: RWRConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # exp(A / temperature) is positive for every advantage. At the temperature 1 and a clip of 5 the
    # weights span e^-5 to e^5.
    weight = (rows.advantage / config.temperature).exp()
    return weight * compute_flow_matching_error(rows, rows.velocity), {"rwr/weight": weight}


ALGORITHM = Algorithm(RWRConfig, compute_loss)
