r"""Flow-GRPO (2505.05470), and by their windows and samplers Flow-GRPO-Fast, MixGRPO (2507.21802) and DanceGRPO (2505.07818).

    rho = exp(log_prob - old_log_prob)
    L   = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

over the terms, one per (sample, trained step); MixGRPO's division by the window length is this mean. Log-probs are means over the
D elements of a latent, so rho stays close to 1 and eps follows 1/sqrt(D). What tells the four apart are defaults of the stage:
which steps are stochastic and trained, the sampler, the standard deviation of the advantages, the reference penalty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, Rows, TrajectoryTerms
from ebbflow.algorithms.policy_gradient import clip_metrics, clipped, ratio_metrics
from ebbflow.recipe.algorithms import ClippedConfig, DanceGRPO, FlowGRPO, FlowGRPOFast, MixGRPO


def loss(terms: TrajectoryTerms, config: ClippedConfig) -> tuple[Tensor, Rows]:
    """Loss and metrics of each term, [M]."""
    ratio = torch.exp(terms.log_prob - terms.old_log_prob)
    metrics = ratio_metrics(terms) | clip_metrics(ratio, terms.advantage, config.clip_range)
    return clipped(ratio, terms.advantage, config.clip_range), metrics


FLOW_GRPO = Algorithm(FlowGRPO, loss)
FLOW_GRPO_FAST = Algorithm(FlowGRPOFast, loss)
MIX_GRPO = Algorithm(MixGRPO, loss)
DANCE_GRPO = Algorithm(DanceGRPO, loss)
