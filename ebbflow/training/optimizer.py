"""The optimiser of a stage, and the learning rate of each of its steps."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.choices import LearningRateScheduleConfig, OptimizerConfig
from ebbflow.training.policy import Policy


def make_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters, one fused kernel for each: on a CPU a fifth of the time of its single operations.

    Raises:
        RecipeError: a pattern of ``lr_factors`` is the first to fit no trained parameter.
    """
    groups = [{"params": values, "lr": config.lr * factor} for factor, values in _rate_groups(policy, config)]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def set_learning_rate(
    optimizer: torch.optim.Optimizer, schedule: LearningRateScheduleConfig, update: int, num_updates: int | None
) -> None:
    """Give every parameter group its learning rate of an optimiser step, from zero: a share of the rate that it was made with.

    Raises:
        RecipeError: the schedule ends with the stage, and nobody knows how many optimiser steps that has.
    """
    if schedule.falls and schedule.updates is None and num_updates is None:
        raise RecipeError(
            f"optimizer.schedule.kind = {schedule.kind!r} needs the number of optimiser steps, which this stage does not know; "
            "set optimizer.schedule.updates"
        )
    share = schedule.share(update, num_updates)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def _rate_groups(policy: Policy, config: OptimizerConfig) -> list[tuple[float, list[Tensor]]]:
    """(factor of the learning rate, parameters); those that no pattern fits come first."""
    groups: list[tuple[float, list[Tensor]]] = [(1.0, []), *((rate.factor, []) for rate in config.lr_factors)]
    for name, parameter in policy.parameters.items():
        fitting = (index for index, rate in enumerate(config.lr_factors, 1) if fnmatchcase(name, rate.parameters))
        groups[next(fitting, 0)][1].append(parameter)
    for rate, (_, values) in zip(config.lr_factors, groups[1:], strict=True):
        if not values:
            raise RecipeError(
                f"optimizer.lr_factors: {rate.parameters!r} is the first to fit no trained parameter; one is called "
                f"{next(iter(policy.parameters))}. Write a pattern such as '*.lora_B.*', special ones before general ones"
            )
    return [group for group in groups if group[1]]
