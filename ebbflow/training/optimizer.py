"""The optimiser of a stage, and the learning rate of each of its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.optimizer_config import LearningRateScheduleConfig, OptimizerConfig
from ebbflow.training.policy import Policy, copy_to_main_memory


class CombinedOptimizer:
    """Several optimisers, each of its own parameters, as one: their parameter groups, and one
    state.

    Example: Muon for the matrices and AdamW for the rest::

        optimizer = CombinedOptimizer(AdamW([bias]), Muon([weight]))
        len(optimizer.param_groups)  # 2
        optimizer.step()
        optimizer.state.keys()  # {bias, weight}
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.state = parts[0].state
        self.param_groups: list[dict[str, Any]] = [
            group for part in parts for group in part.param_groups
        ]
        # One dictionary for all of them, so that a checkpoint reads and writes the state of every
        # parameter without knowing which part steps on it.
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
            host_state = dict(state)
            # To the device, one step, and back: one parameter's state is on the device at a time.
            state.update({key: value.to(parameter.device) for key, value in host_state.items()})
            part.step()
            for key, value in state.items():
                if key in host_state:
                    # Into the memory that is there, which is pinned already.
                    state[key] = host_state[key].copy_(value)
                else:
                    state[key] = copy_to_main_memory(value)  # the first step has made it


AnyOptimizer = torch.optim.Optimizer | CombinedOptimizer


def build_optimizer(policy: Policy, config: OptimizerConfig) -> AnyOptimizer:
    """Build the optimiser over the trained parameters; its state is in main memory where the copies
    of the policy are.

    Raises:
        RecipeError: a pattern of ``lr_factors`` is the first to fit no trained parameter; what the
            optimiser needs is not installed, or its state cannot be where the policy's is.
    """
    # Here as well as in the recipe's checks, because the number of processes is known only now.
    config.require_whole_state("optimizer", policy.sharded, policy.offloaded)
    config.require_package("optimizer")
    groups = _group_by_learning_rate(policy, config)
    optimizer: AnyOptimizer = config.factory.build_optimizer(groups, config)
    return OffloadedOptimizer(optimizer) if policy.offloaded else optimizer


def _split_by_parameter(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    # A group has every setting of its optimiser, so the class alone rebuilds it.
    kind: Any = type(optimizer)
    return [
        kind([group | {"params": [parameter]}])
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def state_to_tensors(state: Mapping[str, Any], shared: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the state of a parameter as tensors that can be stored.

    Args:
        shared: keys of tensors that all parameters have in common; a file stores each tensor of its
            own, so they are copied.
    """
    tensors = {}
    for key, value in state.items():
        if isinstance(value, int):  # 8-bit AdamW counts its steps in a number
            tensors[key] = torch.tensor(value)
        else:
            tensors[key] = value.clone() if key in shared else value
    return tensors


def state_from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Invert ``state_to_tensors``."""
    # No optimiser keeps its state in int64 itself, so that type marks what was a number.
    return {
        key: int(value) if value.dtype == torch.int64 else value for key, value in tensors.items()
    }


def set_learning_rate(
    optimizer: AnyOptimizer,
    schedule: LearningRateScheduleConfig,
    update: int,
    num_updates: int | None,
) -> None:
    """Set the learning rate of every parameter group for an optimiser step, counted from zero: a
    share of the rate that the group was made with.

    Raises:
        RecipeError: the schedule ends with the stage, and nobody knows how many optimiser steps
            that has.
    """
    if schedule.depends_on_length and schedule.updates is None and num_updates is None:
        raise RecipeError(
            f"optimizer.schedule.kind = {schedule.kind!r} needs the number of optimiser steps,"
            " which this stage does not know; set optimizer.schedule.updates"
        )
    # Computed from the number of the step, not from the last rate: a resumed stage needs no state.
    share = schedule.share_of_update(update, num_updates)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def _group_by_learning_rate(policy: Policy, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the parameter groups with their learning rates, none of them empty; parameters that no
    pattern fits come first.
    """
    # Group 0 has the learning rate itself; group n that of the n-th pattern.
    factors = [1.0, *(rate.factor for rate in config.lr_factors)]
    members: list[list[Tensor]] = [[] for _ in factors]
    for name, parameter in policy.parameters.items():
        index = 0
        for number, rate in enumerate(config.lr_factors, 1):
            if fnmatchcase(name, rate.parameters):
                index = number
                break
        members[index].append(parameter)
    for rate, parameters in zip(config.lr_factors, members[1:], strict=True):
        if not parameters:
            raise RecipeError(
                f"optimizer.lr_factors: {rate.parameters!r} is the first to fit no trained"
                f" parameter; one is called {next(iter(policy.parameters))}. Write a pattern such"
                " as '*.lora_B.*', special ones before general ones"
            )
    return [
        {"params": parameters, "lr": config.lr * factor}
        for factor, parameters in zip(factors, members, strict=True)
        if parameters
    ]
