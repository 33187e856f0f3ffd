"""Sign descent: every parameter moves by the learning rate against the sign of its gradient."""

from __future__ import annotations

from typing import Any

import torch

from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.optimizers import OptimizerFactory


class SignSGD(torch.optim.Optimizer):
    """theta <- theta - lr sign(g), without a state."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class SignDescent(OptimizerFactory):
    """Builds ``SignSGD``, whose state takes no memory."""

    def build_optimizer(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> SignSGD:
        return SignSGD(groups, lr=config.lr)

    def count_state_bytes(self, num_parameters: int) -> int:
        return 0


SIGN_DESCENT = SignDescent()
