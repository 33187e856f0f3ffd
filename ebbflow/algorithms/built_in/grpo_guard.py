r"""GRPO-Guard (2510.22319): the ratio of a step is centred at 1 and as wide at every step, so that the clip bites at all of them.

    c    = s sqrt|dt|  (= b, the step's standard deviation)
    bias = mean((mu - mu_old)^2) / (2 c^2)                            of each sample and step by itself
    rho  = exp[(log_prob - old_log_prob + bias) c] = exp(mean(z (mu - mu_old)))     z: the noise of the rollout
    L    = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) / |dt|

Two published implementations differ from the paper, which we follow: one averages the bias over the whole batch, another leaves
out the division by |dt|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows, gaussian_kl
from ebbflow.algorithms.policy_gradient import clip_metrics, clipped, ratio_metrics
from ebbflow.recipe.algorithms import TrajectoryConfig

if TYPE_CHECKING:
    from torch import Tensor


class GRPOGuardConfig(TrajectoryConfig):
    """Flow-GRPO whose ratio is centred and weighted alike at every step, so that the clip bites at all of them."""

    paper: ClassVar = "2510.22319"
    needs_density: ClassVar = True
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "all"}}

    name: Literal["grpo_guard"] = "grpo_guard"
    clip_range: float = Field(1e-4, gt=0, lt=1)
    """Clip of the regulated ratio (published: 2e-6)."""

    def ratio_range(self, dims: int) -> float:
        """That of the regulated ratio, which is nearer to 1 by the factor c < 1."""
        return self.clip_range


def loss(rows: TrajectoryRows, config: GRPOGuardConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    step = rows.transition
    bias = gaussian_kl(step, rows.old_mean)
    regulated = ((rows.log_prob - rows.old_log_prob + bias) * step.std).exp()
    metrics = ratio_metrics(rows) | clip_metrics(regulated, rows.advantage, config.clip_range)
    metrics |= {"guard/ratio_deviation": (regulated - 1).abs(), "guard/bias": bias}
    return clipped(regulated, rows.advantage, config.clip_range) / step.dt.abs(), metrics


ALGORITHM = Algorithm(GRPOGuardConfig, loss)
