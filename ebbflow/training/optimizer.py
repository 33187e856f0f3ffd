"""The optimiser of a stage, and the learning rate of each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.choices import LearningRateScheduleConfig, OptimizerConfig
from ebbflow.training.policy import Policy, copy_to_main_memory

RateGroups = list[tuple[float, list[Tensor]]]
"""(factor of the learning rate, parameters)."""
TABLES = ("qmap1", "qmap2")
"""What the 8 bits of a moment mean, in the state of every parameter of 8-bit AdamW."""


class CombinedOptimizer:
    """Several optimisers, each of its own parameters, as one: their parameter groups, and one
    state.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.state = parts[0].state
        self.param_groups: list[dict[str, Any]] = [
            group for part in parts for group in part.param_groups
        ]
        for part in parts:
            part.state = self.state

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


class OffloadedOptimizer(CombinedOptimizer):
    """An optimiser for each parameter, whose state is in main memory but while it steps."""

    def __init__(self, optimizer: torch.optim.Optimizer | CombinedOptimizer) -> None:
        parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
        super().__init__(*(alone for part in parts for alone in _split_by_parameter(part)))

    def step(self) -> None:
        for part in self.parts:
            (parameter,) = part.param_groups[0]["params"]
            state = self.state[parameter]
            waiting = dict(self.state[parameter])
            state.update({key: value.to(parameter.device) for key, value in waiting.items()})
            part.step()
            for key, value in state.items():
                state[key] = (
                    waiting[key].copy_(value) if key in waiting else copy_to_main_memory(value)
                )


AnyOptimizer = torch.optim.Optimizer | CombinedOptimizer


def build_optimizer(policy: Policy, config: OptimizerConfig) -> AnyOptimizer:
    """The optimiser over the trained parameters; its state is in main memory where the copies of
    the policy are.

    Raises:
        RecipeError: a pattern of ``lr_factors`` is the first to fit no trained parameter; what the
            optimiser needs is not installed, or its state cannot be where the policy's is.
    """
    config.require_whole_state("optimizer", policy.sharded, policy.offloaded)
    config.require_package("optimizer")
    optimizer = _build_by_name(policy, config)
    return OffloadedOptimizer(optimizer) if policy.offloaded else optimizer


def _build_by_name(policy: Policy, config: OptimizerConfig) -> AnyOptimizer:
    groups = _group_by_learning_rate(policy, config)
    if config.name == "adamw":
        return _build_adamw(groups, config)
    if config.name == "adamw_8bit":
        return _build_adamw_8bit(groups, config)
    matrices = _filter_parameters(groups, lambda parameter: parameter.ndim == 2)
    others = _filter_parameters(groups, lambda parameter: parameter.ndim != 2)
    muon = torch.optim.Muon(
        _with_learning_rates(matrices, config),
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return CombinedOptimizer(*([_build_adamw(others, config)] if others else []), muon)


def _split_by_parameter(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    kind: Any = type(optimizer)
    return [
        kind([group | {"params": [parameter]}])
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _build_adamw(groups: RateGroups, config: OptimizerConfig) -> torch.optim.AdamW:
    """One fused kernel for each parameter: on a CPU a fifth of the time of its single
    operations."""
    rated = _with_learning_rates(groups, config)
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(
        rated,
        lr=config.lr,
        betas=betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _build_adamw_8bit(groups: RateGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Parameters of fewer than 4,096 elements have moments of 32 bits, as the library has it."""
    from bitsandbytes.optim import AdamW8bit  # takes seconds

    rated = _with_learning_rates(groups, config)
    betas = (config.betas[0], config.betas[1])
    made: torch.optim.Optimizer = AdamW8bit(
        rated, config.lr, betas, config.eps, config.weight_decay
    )
    return made


def state_to_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter as tensors of its own: 8-bit AdamW counts steps in a number and has
    tables of all parameters.
    """
    own = {key: value.clone() if key in TABLES else value for key, value in state.items()}
    return {
        key: torch.tensor(value) if isinstance(value, int) else value for key, value in own.items()
    }


def state_from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of ``state_to_tensors``."""
    return {
        key: int(value) if value.dtype == torch.int64 else value for key, value in tensors.items()
    }


def _with_learning_rates(groups: RateGroups, config: OptimizerConfig) -> list[dict[str, Any]]:
    return [{"params": values, "lr": config.lr * factor} for factor, values in groups]


def _filter_parameters(groups: RateGroups, wanted: Callable[[Tensor], bool]) -> RateGroups:
    chosen = [
        (factor, [parameter for parameter in values if wanted(parameter)])
        for factor, values in groups
    ]
    return [(factor, values) for factor, values in chosen if values]


def set_learning_rate(
    optimizer: AnyOptimizer,
    schedule: LearningRateScheduleConfig,
    update: int,
    num_updates: int | None,
) -> None:
    """Give every parameter group its learning rate of an optimiser step, from zero: a share of the
    rate that it was made with.

    Raises:
        RecipeError: the schedule ends with the stage, and nobody knows how many optimiser steps
            that has.
    """
    if schedule.depends_on_length and schedule.updates is None and num_updates is None:
        raise RecipeError(
            f"optimizer.schedule.kind = {schedule.kind!r} needs the number of optimiser steps,"
            " which this stage does not know; set optimizer.schedule.updates"
        )
    share = schedule.share_of_update(update, num_updates)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def _group_by_learning_rate(policy: Policy, config: OptimizerConfig) -> RateGroups:
    """(factor of the learning rate, parameters); those that no pattern fits come first."""
    groups: RateGroups = [(1.0, []), *((rate.factor, []) for rate in config.lr_factors)]
    for name, parameter in policy.parameters.items():
        fitting = (
            index
            for index, rate in enumerate(config.lr_factors, 1)
            if fnmatchcase(name, rate.parameters)
        )
        groups[next(fitting, 0)][1].append(parameter)
    for rate, (_, values) in zip(config.lr_factors, groups[1:], strict=True):
        if not values:
            raise RecipeError(
                f"optimizer.lr_factors: {rate.parameters!r} is the first to fit no trained"
                f" parameter; one is called {next(iter(policy.parameters))}. Write a pattern such"
                " as '*.lora_B.*', special ones before general ones"
            )
    return [group for group in groups if group[1]]
