r"""Flow-GRPO (2505.05470), and by their windows and samplers Flow-GRPO-Fast, MixGRPO (2507.21802) and DanceGRPO (2505.07818).

    rho = exp(log_prob - old_log_prob)
    L   = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

over the rows, one per (sample, trained step); MixGRPO's division by the window length is this mean. Log-probs are means over the
D elements of a latent, so rho stays close to 1 and eps follows 1/sqrt(D). What tells the four apart are defaults of the stage:
which steps are stochastic and trained, the sampler, the standard deviation of the advantages, the reference penalty.

Deviations: the trained steps are one draw for all samples of an optimisation step. DanceGRPO's code draws a permutation of them
for each sample; a window of its own for each sample, which public code has too, made training collapse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows
from ebbflow.algorithms.policy_gradient import clip_metrics, clipped, ratio_metrics
from ebbflow.recipe.algorithms import TrajectoryConfig

if TYPE_CHECKING:
    from torch import Tensor


class ClippedConfig(TrajectoryConfig):
    """Policy gradients with a clipped ratio."""

    clip_range: float = Field(1e-3, gt=0, lt=1)
    """Clip of the ratio (published: 1e-4, and 1e-5 for Flow-GRPO-Fast)."""

    def ratio_range(self, dims: int) -> float:
        return self.clip_range


class FlowGRPOConfig(ClippedConfig):
    """Clipped policy gradient on every stochastic denoising step."""

    paper: ClassVar = "2505.05470"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "all"}, "reference": {"weight": 0.02}}

    name: Literal["flow_grpo"] = "flow_grpo"


class FlowGRPOFastConfig(ClippedConfig):
    """Flow-GRPO on a short window that starts anew at random in the first half; no reference penalty."""

    paper: ClassVar = "2505.05470"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "random", "size": 2}}

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"


class MixGRPOConfig(ClippedConfig):
    """Flow-GRPO on a window that moves from the first steps on; the steps outside are deterministic."""

    paper: ClassVar = "2507.21802"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde"}, "window": {"kind": "progressive"}, "reference": {"weight": 0.02}}

    name: Literal["mix_grpo"] = "mix_grpo"


class DanceGRPOConfig(ClippedConfig):
    """Clipped policy gradient on Dance-SDE: each group by its own standard deviation, a random share of the steps."""

    paper: ClassVar = "2505.07818"
    stage_defaults: ClassVar = {
        "sampler": {"name": "dance_sde"},
        "window": {"kind": "share", "share": 0.6},
        "advantages": {"std": "group"},
    }

    name: Literal["dance_grpo"] = "dance_grpo"


def loss(rows: TrajectoryRows, config: ClippedConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    ratio = (rows.log_prob - rows.old_log_prob).exp()
    metrics = ratio_metrics(rows) | clip_metrics(ratio, rows.advantage, config.clip_range)
    return clipped(ratio, rows.advantage, config.clip_range), metrics


FLOW_GRPO = Algorithm(FlowGRPOConfig, loss)
FLOW_GRPO_FAST = Algorithm(FlowGRPOFastConfig, loss)
MIX_GRPO = Algorithm(MixGRPOConfig, loss)
DANCE_GRPO = Algorithm(DanceGRPOConfig, loss)
