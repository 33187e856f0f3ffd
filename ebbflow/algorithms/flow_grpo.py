r"""Flow-GRPO (2505.05470) and, on a window of the denoising steps, MixGRPO (2507.21802).

    rho = exp(log_prob - old_log_prob)
    L   = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta mean KL,   KL = mean((mu - mu_ref)^2) / (2 b^2)

over the terms, one per (sample, trained step); MixGRPO's division by the window length is this mean. Log-probs are means over the
D elements of a latent, so rho stays close to 1 and eps follows 1/sqrt(D).

Deviation: the KL has the true standard deviation b, dt included; the published code divides by 2 s^2, without dt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, CopyName, Metrics, TrajectoryTerms, per_term, rows
from ebbflow.recipe.algorithms import FlowGRPO


def loss(terms: TrajectoryTerms, config: FlowGRPO) -> tuple[Tensor, Metrics]:
    """Mean over the terms, and the metrics of the step."""
    advantage = terms.advantage
    ratio = torch.exp(terms.log_prob - terms.old_log_prob)
    clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    total = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
    metrics = {
        "ratio/mean": ratio.mean(),
        "ratio/deviation": (ratio - 1).abs().mean(),
        "clip/up": ((ratio > 1 + config.clip_range) & (advantage > 0)).float().mean(),
        "clip/down": ((ratio < 1 - config.clip_range) & (advantage < 0)).float().mean(),
        "kl/old": (0.5 * (terms.log_prob - terms.old_log_prob) ** 2).mean(),
    }
    if config.reference_weight > 0:
        divergence = kl(terms).mean()
        total = total + config.reference_weight * divergence
        metrics["kl/reference"] = divergence
    return total, metrics


def kl(terms: TrajectoryTerms) -> Tensor:
    """KL(policy || reference) of the step per latent element, [M]."""
    step = terms.transition
    std = rows(step.std, step.mean)
    return per_term((step.mean - terms.copies["reference"].mean) ** 2 / (2 * std**2))


def copies(config: FlowGRPO) -> frozenset[CopyName]:
    return frozenset({"reference"} if config.reference_weight > 0 else ())


ALGORITHM = Algorithm(
    summary="clipped policy gradient on stochastic denoising steps (with a moving window: MixGRPO)",
    terms=TrajectoryTerms,
    loss=loss,
    copies=copies,
)
