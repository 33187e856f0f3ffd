r"""Supervised fine-tuning on the best samples of every group (rejection sampling): L = mean((v - u)^2), u = eps - x0."""

from __future__ import annotations

from torch import Tensor

from ebbflow.algorithms import units
from ebbflow.algorithms.base import Algorithm, ForwardTerms, Rows, flow_matching_error
from ebbflow.recipe.algorithms import SFT


def loss(terms: ForwardTerms, config: SFT) -> tuple[Tensor, Rows]:
    """Loss and metrics of each term, [M]."""
    return flow_matching_error(terms, terms.velocity), {}


ALGORITHM = Algorithm(SFT, loss, select=units.best)
