r"""Diffusion-DPO (2311.12908): of a pair, the better sample's error must fall more than the worse one's.

    e = mean((v - u)^2),   u = eps - x0
    L = -log sigmoid( -(beta / 2) [(e_better - e_better_ref) - (e_worse - e_worse_ref)] )

sigma (logit-normal) and eps are shared inside a pair. Pairs come from a file, or from a group: the best quarter against the worst
quarter; ties make no pair (published code trains on them). The reference is the base model, or, refreshed every n optimiser
steps, an older self. Both rows of a pair carry its loss, so that the mean over the rows is the mean over the pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, CopyName, ForwardRows, RowMetrics, flow_matching_error
from ebbflow.recipe.algorithms import DiffusionDPOConfig


def loss(rows: ForwardRows, config: DiffusionDPOConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]; rows 2i and 2i + 1 are the better and the worse sample of a pair."""
    change = flow_matching_error(rows, rows.velocity) - flow_matching_error(rows, rows.copies[anchor(config)])
    better, worse = change.view(-1, 2).unbind(1)
    margin = -0.5 * config.beta * (better - worse)
    total = -torch.nn.functional.logsigmoid(margin)
    metrics = {"dpo/margin": margin, "dpo/accuracy": (margin > 0).float(), "dpo/better_change": better, "dpo/worse_change": worse}
    return total.repeat_interleave(2), {name: value.repeat_interleave(2) for name, value in metrics.items()}


def anchor(config: DiffusionDPOConfig) -> CopyName:
    """The copy that stands as the reference of the pairs."""
    return "old" if config.refresh_every else "reference"


def old_decay(config: DiffusionDPOConfig, optimizer_step: int) -> float:
    """A fresh copy every ``refresh_every`` optimiser steps, none in between."""
    return float(optimizer_step % config.refresh_every != 0) if config.refresh_every else 1.0


ALGORITHM = Algorithm(
    DiffusionDPOConfig, loss, copies=lambda config: frozenset({anchor(config)}), select=grouping.pairs, old_decay=old_decay
)
