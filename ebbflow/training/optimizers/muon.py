"""Muon for matrices, AdamW for all other parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.optimizers import OptimizerFactory
from ebbflow.training.optimizers.adamw import ADAMW

if TYPE_CHECKING:
    from ebbflow.recipe.optimizer_config import OptimizerConfig
    from ebbflow.training.optimizer import CombinedOptimizer


class Muon(OptimizerFactory):
    """torch's Muon, with learning rates as large as AdamW's."""

    name: ClassVar = "muon"
    summary: ClassVar = (
        "Muon for all matrices, whose step is made orthogonal and as large as AdamW's (2502.16982),"
        " AdamW for the rest"
    )
    uses_momentum: ClassVar = True

    def build_optimizer(
        self, groups: list[dict[str, Any]], config: OptimizerConfig
    ) -> CombinedOptimizer:
        import torch

        from ebbflow.training.optimizer import CombinedOptimizer

        # torch's Muon refuses parameters that are no matrices.
        muon = torch.optim.Muon(
            _select_parameters(groups, matrices=True),
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            # Steps as large as AdamW's, so that a recipe's learning rate fits both.
            adjust_lr_fn="match_rms_adamw",
        )
        others = _select_parameters(groups, matrices=False)
        if not others:
            return CombinedOptimizer(muon)
        return CombinedOptimizer(ADAMW.build_optimizer(others, config), muon)


def _select_parameters(groups: list[dict[str, Any]], matrices: bool) -> list[dict[str, Any]]:
    """Return the parameter groups with their matrices alone, or without them; no empty groups."""
    selected = [
        group | {"params": [p for p in group["params"] if (p.ndim == 2) == matrices]}
        for group in groups
    ]
    return [group for group in selected if group["params"]]


MUON = Muon()
