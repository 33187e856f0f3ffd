r"""DGPO (2510.08425): direct preference between the better and the worse part of a whole group.

    d   = mean((v - u)^2),   u = eps - x0
    S_g = (1 / K) sum over the group of A beta (sg d - d_ref)
    L   = mean[sg sigmoid(S_g) A d]

sigma and eps are shared inside a group. What a group still has to gain, sigmoid(S_g), weighs its terms; the sampler may be
deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms import units
from ebbflow.algorithms.base import Algorithm, ForwardTerms, Rows, flow_matching_error, unit_mean
from ebbflow.recipe.algorithms import DGPO


def loss(terms: ForwardTerms, config: DGPO) -> tuple[Tensor, Rows]:
    """Loss and metrics of each term, [M]."""
    error = flow_matching_error(terms, terms.velocity)
    change = error.detach() - flow_matching_error(terms, terms.copies["reference"])
    weight = torch.sigmoid(unit_mean(terms.advantage * config.beta * change, terms.unit))
    return weight * terms.advantage * error, {"dgpo/weight": weight, "dgpo/change": change}


ALGORITHM = Algorithm(DGPO, loss, copies=lambda config: frozenset({"reference"}), select=units.groups)
