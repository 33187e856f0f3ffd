r"""GRPO-Guard (2510.22319): the ratio of a step is centred at 1 and as wide at every step, so that
the clip bites at all of them.

    c    = s sqrt|dt|  (= b, the step's standard deviation)
    bias = mean((mu - mu_old)^2) / (2 c^2)       of each sample and step by itself
    rho  = exp[(log_prob - old_log_prob + bias) c] = exp(mean(z (mu - mu_old)))
    L    = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) / |dt|

z is the noise of the rollout. Two published implementations differ from the paper, which we follow:
one averages the bias over the whole batch, another leaves out the division by |dt|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows, compute_gaussian_kl
from ebbflow.algorithms.loss_terms import (
    compute_clipped_loss,
    compute_ratio_metrics,
    published_flow_grpo_settings,
)
from ebbflow.recipe.algorithms import PublishedSetting, TrajectoryConfig

if TYPE_CHECKING:
    from torch import Tensor


GUARD = "verl-project/verl-omni examples/grpoguard_trainer/qwen_image/run_qwen_image_ocr_lora.sh"
STACK = "yifan123/flow_grpo config/grpo.py general_ocr_sd3"


class GRPOGuardConfig(TrajectoryConfig):
    """Flow-GRPO whose ratio is centred and weighted alike at every step, so that the clip bites at
    all of them.
    """

    paper: ClassVar = "2510.22319"
    compares_means: ClassVar = True
    needs_density: ClassVar = True
    stage_defaults: ClassVar = {
        "sampler": {"name": "flow_sde", "steps": 10},
        "window": {"kind": "all"},
        "updates_per_step": 2,
    }
    published: ClassVar = published_flow_grpo_settings(STACK) | {
        "algorithm.clip_range": PublishedSetting(2e-6, GUARD),
        "sampler.steps": PublishedSetting(10, STACK, "the same for Qwen-Image, with eta 1.2"),
        "window.kind": PublishedSetting(
            "all", STACK, "for Qwen-Image a random one of 2 steps in the first half"
        ),
        "reference.weight": PublishedSetting(0.0, GUARD),
    }

    name: Literal["grpo_guard"] = "grpo_guard"
    clip_range: float = Field(2e-6, gt=0, lt=1)
    """Clip range of the regulated ratio. Its logarithm is a mean over the latent's elements, so a
    model with fewer elements needs a wider range.
    """

    def ratio_range(self, dims: int) -> float:
        """Return the clip of the regulated ratio, which is nearer to 1 by the factor c < 1."""
        return self.clip_range


def compute_loss(rows: TrajectoryRows, config: GRPOGuardConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    step = rows.transition

    # bias = mean((mu - mu_old)^2) / (2 c^2). Over rollouts log_prob - old_log_prob has the mean
    # -bias: any shift of the means lowers it, so an uncorrected ratio lies below 1.
    bias = compute_gaussian_kl(step, rows.old_mean)

    # rho = exp[(log_prob - old_log_prob + bias) c]. Times c, because the spread of a log-prob goes
    # with 1 / c: the same clip range then bites at early and at late steps.
    regulated = ((rows.log_prob - rows.old_log_prob + bias) * step.std).exp()
    loss, clip_metrics = compute_clipped_loss(regulated, rows.advantage, config.clip_range)
    metrics = compute_ratio_metrics(rows) | clip_metrics
    metrics |= {"guard/ratio_deviation": (regulated - 1).abs(), "guard/bias": bias}

    # The paper's weight 1 / |dt| of a step, which one public port leaves out.
    return loss / step.dt.abs(), metrics


ALGORITHM = Algorithm(GRPOGuardConfig, compute_loss)
