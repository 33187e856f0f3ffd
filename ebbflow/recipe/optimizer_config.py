"""The optimiser of a stage: its name, its learning rate over time, and the factors of single
parameters.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ebbflow.recipe.base import RecipeError, Strict
from ebbflow.recipe.optimizers import OptimizerFactory, built_in_optimizers, find_optimizer
from ebbflow.recipe.plugins import describe_choices, validate_name_or_path

SCHEDULES = {
    "constant": "stays at lr",
    "linear": "falls evenly from lr to 'final' of it",
    "cosine": "falls along half a cosine from lr to 'final' of it (1608.03983)",
}


class LearningRateScheduleConfig(Strict):
    """The learning rate at each optimiser step of the stage: it rises during the warm-up, then
    follows ``kind``."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        "constant", description=describe_choices(SCHEDULES)
    )
    warmup: int = Field(0, ge=0)
    """Optimiser steps of the warm-up. Step n, counted from zero, has the learning rate lr (n + 1) /
    (warmup + 1)."""
    updates: int | None = Field(None, ge=1)
    """Optimiser steps, warm-up included, after which ``linear`` and ``cosine`` stay at ``final``.
    Default: all optimiser steps of the stage."""
    final: float = Field(0.0, ge=0, le=1)
    """Final learning rate of ``linear`` and ``cosine``, as a share of lr."""

    @property
    def depends_on_length(self) -> bool:
        """Whether it depends on the number of optimiser steps."""
        return self.kind != "constant"

    def share_of_update(self, update: int, updates: int | None) -> float:
        """The share of lr at an optimiser step, from zero.

        Args:
            updates: optimiser steps of the stage; only of a schedule that falls, and that does not
                say when it ends.
        """
        # Not update / warmup: the first step would have the learning rate 0 and change nothing.
        if update < self.warmup:
            return (update + 1) / (self.warmup + 1)
        if not self.depends_on_length:
            return 1.0
        end = self.updates or updates
        assert end is not None, "the updater says how many there are"
        # At least 1: an offline stage may end within its warm-up, which only online stages check.
        # At most 1: the share stays at ``final`` after the end.
        done = min((update - self.warmup) / max(end - self.warmup, 1), 1.0)
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * left

    @model_validator(mode="after")
    def _check_every_key_is_used(self) -> LearningRateScheduleConfig:
        if not self.depends_on_length and (self.updates is not None or self.final):
            raise ValueError(
                "updates and final are for kind linear or cosine; leave them out, or take one of"
                " the two"
            )
        if self.updates is not None and self.updates <= self.warmup:
            raise ValueError(
                f"updates = {self.updates} must be above warmup = {self.warmup}; lower warmup, or"
                " raise updates"
            )
        return self


class LearningRateFactorConfig(Strict):
    """A learning-rate factor for some of the parameters."""

    parameters: str = Field(min_length=1)
    """Pattern of parameter names, where ``*`` stands for anything: ``"*.lora_B.*"`` with factor 16
    is LoRA+ (2402.12354)."""
    factor: float = Field(ge=0)
    """Factor of the learning rate. 0 freezes the parameters."""


OPTIMIZERS = {name: factory.summary for name, factory in built_in_optimizers().items()}


class OptimizerConfig(Strict):
    """The optimiser, with gradient clipping."""

    name: Annotated[str, validate_name_or_path(*OPTIMIZERS)] = Field(
        "adamw",
        description=(
            f"{describe_choices(OPTIMIZERS)} Or package.module:NAME of your own"
            " (docs/extending.md)."
        ),
    )
    lr: float = Field(3e-4, ge=0, le=1)
    """Learning rate."""
    schedule: LearningRateScheduleConfig = LearningRateScheduleConfig()
    lr_factors: list[LearningRateFactorConfig] = []
    """Learning-rate factors of some parameters, by name. The first pattern that matches applies."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2
    )
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Number added to the square root of AdamW's running mean of the squared gradient."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Nesterov momentum of Muon."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay, decoupled from the gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""

    @model_validator(mode="after")
    def _check_path_of_optimizer(self) -> OptimizerConfig:
        try:
            find_optimizer(self.name)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _check_momentum_is_used(self) -> OptimizerConfig:
        # Compared with the default instead of asking whether it was set: a resolved recipe sets
        # every key.
        default = OptimizerConfig.model_fields["momentum"].default
        if self.momentum != default and not self.factory.uses_momentum:
            raise ValueError(f"momentum is for name: muon, and {self.name} has betas; leave it out")
        return self

    @property
    def factory(self) -> OptimizerFactory:
        """What builds the optimiser and knows what it needs."""
        return find_optimizer(self.name)

    @property
    def has_divisible_state(self) -> bool:
        """Whether its state can be divided among processes and wait in main memory."""
        return self.factory.state_is_divisible

    def require_whole_state(self, key: str, sharded: bool, offloaded: bool = False) -> None:
        """Check that the state stays where the optimiser has it; ``key`` is that of the optimiser
        in messages.

        Raises:
            RecipeError: it cannot be divided or wait in main memory, and it would be.
        """
        if self.has_divisible_state:
            return
        if offloaded:
            raise RecipeError(
                f"{key}.name = {self.name!r} has a state that cannot wait in main memory; leave"
                " model.cpu_offload out, or take adamw"
            )
        if sharded:
            raise RecipeError(
                f"{key}.name = {self.name!r} has a state that cannot be divided among processes;"
                " train with one (EBBFLOW_TRAIN_PROCESSES=1, or resources.training.count: 1 of an"
                " online stage), or take adamw"
            )

    def require_package(self, key: str) -> None:
        """Check that what the optimiser needs is installed.

        Raises:
            RecipeError: it is not.
        """
        factory = self.factory
        if not factory.is_installed():
            # In quotes, since shells take the brackets for a pattern of file names.
            what = f'"ebbflow[{factory.extra}]"' if factory.extra else factory.package
            raise RecipeError(
                f"{key}.name = {self.name!r} needs {factory.package}, which is not installed; run"
                f" `pip install {what}`, or take adamw"
            )
