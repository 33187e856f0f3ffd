r"""Flow-GRPO (2505.05470), and by their windows and samplers Flow-GRPO-Fast, MixGRPO (2507.21802) and DanceGRPO (2505.07818).

    rho = exp(log_prob - old_log_prob)
    L   = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

over the rows, one per (sample, trained step); MixGRPO's division by the window length is this mean. Log-probs are means over the
D elements of a latent, so rho stays close to 1 and eps follows 1/sqrt(D). What tells the four apart are defaults of the stage:
which steps are stochastic and trained, the sampler, the standard deviation of the advantages, the reference penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows
from ebbflow.algorithms.policy_gradient import clip_metrics, clipped, ratio_metrics
from ebbflow.recipe.algorithms import ClippedConfig, DanceGRPOConfig, FlowGRPOConfig, FlowGRPOFastConfig, MixGRPOConfig


def loss(rows: TrajectoryRows, config: ClippedConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    ratio = torch.exp(rows.log_prob - rows.old_log_prob)
    metrics = ratio_metrics(rows) | clip_metrics(ratio, rows.advantage, config.clip_range)
    return clipped(ratio, rows.advantage, config.clip_range), metrics


FLOW_GRPO = Algorithm(FlowGRPOConfig, loss)
FLOW_GRPO_FAST = Algorithm(FlowGRPOFastConfig, loss)
MIX_GRPO = Algorithm(MixGRPOConfig, loss)
DANCE_GRPO = Algorithm(DanceGRPOConfig, loss)
