r"""CRD (2603.14128): regress the change against the old policy on the advantage, both centred inside the group of a prompt.

    r = -[mean((v - u)^2) / w - mean((v_old - u)^2) / w_old],   w = sg max(mean|v - u|, 1e-5),  w_old likewise,  u = eps - x0
    L = (5 / beta) mean((beta (r - mean_group r) - (A - mean_group A))^2)

sigma and eps are shared inside a group. Rollouts come from the old policy, as in DiffusionNFT.
"""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms import units
from ebbflow.algorithms.base import Algorithm, ForwardTerms, Rows, per_term, unit_mean
from ebbflow.recipe.algorithms import CRD


def loss(terms: ForwardTerms, config: CRD) -> tuple[Tensor, Rows]:
    """Loss and metrics of each term, [M]."""
    implied = -(_weighted_error(terms, terms.velocity) - _weighted_error(terms, terms.copies["old"]))
    target = _centred(terms.advantage, terms.unit)
    miss = config.beta * _centred(implied, terms.unit) - target
    return 5 / config.beta * miss**2, {"crd/implied": implied, "crd/agreement": (implied * target > 0).float()}


def _weighted_error(terms: ForwardTerms, velocity: Tensor) -> Tensor:
    error = velocity - (terms.noise - terms.clean)
    return per_term(error**2) / per_term(error.detach().abs()).clamp_min(1e-5)


def _centred(values: Tensor, unit: Tensor) -> Tensor:
    return values - unit_mean(values, unit)


ALGORITHM = Algorithm(
    CRD,
    loss,
    copies=lambda config: frozenset({"old"}),
    select=units.groups,
    old_decay=lambda config, step: config.old.decay(step),
    generates="old",
)
