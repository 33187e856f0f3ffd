r"""Flow-DPPO (2606.11025): instead of a clipped ratio, a limit on the divergence of each step.

    D_kl = mean((mu - mu_old)^2) / (2 b^2)
    L    = mean -A rho,   without the rows that are at the limit and move further away:
           D_kl >= tau and ((rho > 1 and A > 0) or (rho < 1 and A < 0))

A dropped row counts as 0 in the mean, as a clipped one has no gradient. The paper's divergence is
a full norm, |mu - mu_old|^2 / (2 b^2); its public code takes the mean over the latent's elements,
and so do we: tau is a threshold on the mean. Advantages are not clamped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows, compute_gaussian_kl
from ebbflow.algorithms.loss_terms import compute_ratio_metrics
from ebbflow.recipe.algorithms import SUM_OF_REWARDS, PublishedSetting, TrajectoryConfig

if TYPE_CHECKING:
    from torch import Tensor


DPPO = "Tencent-Hunyuan/UniRL examples/diffusion/sd3_flowdppo.yaml"


class FlowDPPOConfig(TrajectoryConfig):
    """Policy gradient that drops the rows which move further away than a divergence allows, instead
    of clipping a ratio.
    """

    paper: ClassVar = "2606.11025"
    compares_means: ClassVar = True
    stage_defaults: ClassVar = {
        "sampler": {"name": "flow_sde", "steps": 10},
        "window": {"kind": "random", "size": 3, "limit": 0.3},
        "advantages": {"clip": None},
        "optimizer": {"weight_decay": 0.0},
        "updates_per_step": 2,
    }
    published: ClassVar = {
        "algorithm.divergence_limit": PublishedSetting(
            1e-5, DPPO, "kl_mask_threshold, on the mean over the latent's elements"
        ),
        "sampler.name": PublishedSetting(
            "flow_sde", DPPO, "eta .7; 1.2 for Qwen-Image in verl-project/verl-omni"
        ),
        "sampler.steps": PublishedSetting(10, DPPO),
        "window.kind": PublishedSetting("random", DPPO),
        "window.size": PublishedSetting(3, DPPO, "2 for Qwen-Image in verl-project/verl-omni"),
        "window.limit": PublishedSetting(
            0.3, DPPO, "starts 0 to 2 of 10: all of it lies in the first half"
        ),
        "advantages.std": PublishedSetting("global", DPPO),
        "advantages.combine": PublishedSetting("sum", DPPO, deviation=SUM_OF_REWARDS),
        "advantages.clip": PublishedSetting(
            None, "Tencent-Hunyuan/UniRL unirl/algorithms/flowdppo.py"
        ),
        "reference.weight": PublishedSetting(0.0, DPPO),
        "optimizer.lr": PublishedSetting(3e-4, DPPO, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(0.0, DPPO, "1e-4 in verl-project/verl-omni"),
        "optimizer.max_grad_norm": PublishedSetting(1.0, DPPO),
        "updates_per_step": PublishedSetting(2, DPPO),
        "group_size": PublishedSetting(16, DPPO),
        "the steps of a window": PublishedSetting(
            "3 of the first 5, drawn one by one",
            "Tencent-Hunyuan/UniRL unirl/utils/scheduler_utils.py",
            deviation="a window has no gaps, as in verl-project/verl-omni",
            ours="neighbours",
        ),
    }

    name: Literal["flow_dppo"] = "flow_dppo"
    divergence_limit: float = Field(1e-5, gt=0)
    """Limit tau of the divergence mean((mu - mu_old)^2) / (2 b^2). A term above it gives no
    gradient that moves the policy further away from the old policy.
    """

    def ratio_range(self, dims: int) -> float:
        """Return sqrt(2 tau / D): a shift of the means with D_kl = tau spreads the mean log-prob
        by this.
        """
        return math.sqrt(2 * self.divergence_limit / dims)


def compute_loss(rows: TrajectoryRows, config: FlowDPPOConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # rho, and D_kl = mean((mu - mu_old)^2) / (2 b^2), the mean over elements as in public code.
    ratio = (rows.log_prob - rows.old_log_prob).exp()
    divergence = compute_gaussian_kl(rows.transition, rows.old_mean)

    # A row whose ratio has moved the way its advantage pulls is dropped at the limit. A row that
    # comes back towards the old policy is kept, however far away it is.
    too_high = ratio > 1
    too_low = ratio < 1
    away = too_high.where(rows.advantage > 0, too_low) & (rows.advantage != 0)
    dropped = away & (divergence >= config.divergence_limit)
    metrics = compute_ratio_metrics(rows) | {
        "dppo/divergence": divergence,
        "dppo/dropped": dropped.float(),
    }
    # A dropped row counts as 0 and stays in the mean's denominator, as a clipped one does.
    return (-rows.advantage * ratio).where(~dropped, 0.0), metrics


ALGORITHM = Algorithm(FlowDPPOConfig, compute_loss)
