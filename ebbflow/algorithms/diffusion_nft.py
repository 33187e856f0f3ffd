r"""DiffusionNFT (2509.16117): contrast an implicit better with an implicit worse policy, on the forward process alone.

    p   = clip(A / 10 + 1/2, 0, 1)                                        A is already clamped to +-5
    v+  = beta v + (1 - beta) v_old,        v- = (1 + beta) v_old - beta v
    x0+- = x_sigma - sigma v+-,             w+- = sg max(mean|x0+- - x0|, 1e-5),   l+- = mean((x0+- - x0)^2) / w+-
    L   = 5 mean[(p l+ + (1 - p) l-) / beta] + k mean((v - v_ref)^2)

It needs the final latents and the reward, no trajectory and no log-probability, so any sampler may generate them. They come from
the OLD policy, which is part of the policy folder.

Deviations: online, the old policy follows after every optimiser step (not every epoch), with a decay that grows to a maximum;
offline it stays fixed through the stage. The sigmas of a sample are stratified.
"""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms.base import Algorithm, CopyName, ForwardTerms, Metrics, per_term, rows
from ebbflow.recipe.algorithms import DiffusionNFT


def loss(terms: ForwardTerms, config: DiffusionNFT) -> tuple[Tensor, Metrics]:
    """Mean over the terms, and the metrics of the step."""
    old = terms.copies["old"]
    preference = (terms.advantage / 10 + 0.5).clamp(0, 1)
    better = config.beta * terms.velocity + (1 - config.beta) * old
    worse = (1 + config.beta) * old - config.beta * terms.velocity
    better_error, worse_error = _weighted_error(terms, better), _weighted_error(terms, worse)
    total = 5 * ((preference * better_error + (1 - preference) * worse_error) / config.beta).mean()
    metrics = {
        "nft/better_error": better_error.mean(),
        "nft/worse_error": worse_error.mean(),
        "nft/old_deviation": per_term((terms.velocity - old) ** 2).mean(),
    }
    if config.reference_weight > 0:
        drift = per_term((terms.velocity - terms.copies["reference"]) ** 2).mean()
        total = total + config.reference_weight * drift
        metrics["kl/reference"] = drift
    return total, metrics


def _weighted_error(terms: ForwardTerms, velocity: Tensor) -> Tensor:
    """l of one implicit policy, [M]."""
    # x_sigma - sigma v - x0 = sigma (eps - x0 - v)
    error = rows(terms.sigma, velocity) * (terms.noise - terms.clean - velocity)
    weight = per_term(error.detach().abs()).clamp_min(1e-5)
    return per_term(error**2) / weight


def copies(config: DiffusionNFT) -> frozenset[CopyName]:
    return frozenset({"old", "reference"} if config.reference_weight > 0 else {"old"})


def old_decay(config: DiffusionNFT, optimizer_step: int) -> float:
    """d = old_policy_decay * min(1, step / old_policy_decay_steps)."""
    ramp = min(1.0, optimizer_step / config.old_policy_decay_steps) if config.old_policy_decay_steps else 1.0
    return config.old_policy_decay * ramp


ALGORITHM = Algorithm(
    summary="forward-process contrast of better and worse samples; needs final latents only",
    terms=ForwardTerms,
    loss=loss,
    copies=copies,
    draws=lambda config: config.noise_levels,
    old_decay=old_decay,
)
