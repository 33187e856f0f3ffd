"""One call of a loss on random rows, so that a user's own algorithm fails in a second instead of
after the first rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import Algorithm, SurrogateRows
from ebbflow.recipe.algorithms import AlgorithmConfig
from ebbflow.recipe.base import RecipeError, sanitize_text
from ebbflow.training.kinds.base import trainable_kind

PROMPTS = 2
GROUP = 4
LATENT = (1, 4, 4)
STEPS = 6
SAMPLER = "flow_sde"
DISTANCE = 0.05
"""Standard deviation of the velocity of a copy from that of the policy."""


@dataclass(frozen=True)
class TrialInputs:
    """Random numbers for the rows of some sample groups, the same in every call.

    Attributes:
        advantage: [M], from 1 for the first sample of a prompt to -1 for the last.
        group_index: integer [M], the group of each row.
    """

    advantage: Tensor
    group_index: Tensor
    generator: torch.Generator

    @staticmethod
    def sample(groups: list[np.ndarray]) -> TrialInputs:
        """Return the inputs of some groups of samples, a row for each sample."""
        group_index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        advantage = np.tile(np.linspace(1, -1, GROUP), PROMPTS)[np.concatenate(groups)]
        return TrialInputs(
            advantage=torch.from_numpy(advantage).float(),
            group_index=torch.from_numpy(group_index),
            generator=torch.Generator().manual_seed(0),
        )

    def sample_noise(self) -> Tensor:
        """Return normal numbers in the shape of latents, [M, ...]; others in each call."""
        return torch.randn(len(self.group_index), *LATENT, generator=self.generator)

    def move_away(self, velocity: Tensor) -> Tensor:
        """Return the prediction of a policy copy that is near the policy's, [M, ...]."""
        return velocity.detach() + DISTANCE * self.sample_noise()


def try_loss(path: str, algorithm: Algorithm, hyper: AlgorithmConfig) -> None:
    """Call the selection and the losses of an algorithm on random rows, and check what they return.

    Args:
        path: what the recipe calls it.

    Raises:
        RecipeError: one of them fails, the loss is not a finite number for each row, or no gradient
            reaches the prediction.
    """
    # The selection first, because the loss gets the rows of the groups that it returns.
    groups = _try_selection(path, algorithm, hyper)
    rows, velocity = trainable_kind(hyper.kind).build_trial_rows(groups, algorithm, hyper)
    name = f"the loss of {path}, {_name_of_function(algorithm.loss)},"
    _try_rows(name, algorithm.loss, rows, velocity, hyper)
    if algorithm.surrogate_loss is not None:
        name = f"the surrogate loss of {path}, {_name_of_function(algorithm.surrogate_loss)},"
        _try_rows(name, algorithm.surrogate_loss, *_build_surrogate_rows(groups), hyper)


def _build_surrogate_rows(groups: list[np.ndarray]) -> tuple[SurrogateRows, Tensor]:
    """Return the rows of a surrogate reward, and its prediction, which gets the gradient."""
    inputs = TrialInputs.sample(groups)
    velocity = inputs.sample_noise().requires_grad_()
    rows = SurrogateRows(
        velocity=velocity,
        target=inputs.sample_noise(),
        teacher=inputs.move_away(velocity),
        old=inputs.move_away(velocity),
        step_share=torch.ones(len(velocity)),  # the last step
        advantage=inputs.advantage,
        group_index=inputs.group_index,
    )
    return rows, velocity


def _try_rows(
    name: str,
    loss_function: Callable[[Any, Any], Any],
    rows: Any,
    velocity: Tensor,
    hyper: AlgorithmConfig,
) -> None:
    """Call a loss on rows, and check what it returns.

    Args:
        velocity: what the gradient must reach, [M, ...].
    """
    count = len(velocity)
    try:
        returned: Any = loss_function(rows, hyper)
    except Exception as error:  # a user's own code can raise anything
        raise RecipeError(
            f"{name} fails on {count} random rows:"
            f" {sanitize_text(f'{type(error).__name__}: {error}')}"
        ) from error
    match returned:
        case (Tensor() as loss, Mapping() as metrics):
            _check_per_row(name, {"the loss": loss, **metrics}, count)
            _check_gradient(name, loss, velocity)
        case _:
            raise RecipeError(
                f"{name} returned {_describe_value(returned)}; return (loss of each row [M],"
                " metrics of each row)"
            )


def _try_selection(path: str, algorithm: Algorithm, hyper: AlgorithmConfig) -> list[np.ndarray]:
    advantage = np.tile(np.linspace(1, -1, GROUP), PROMPTS)
    prompt_ids = np.repeat(np.arange(PROMPTS), GROUP)
    keep = np.ones(PROMPTS * GROUP, bool)
    name = f"the selection of {path}, {_name_of_function(algorithm.select)},"
    try:
        groups = algorithm.select(advantage, keep, prompt_ids, hyper)
        samples = np.concatenate(groups)
    except Exception as error:  # as above
        raise RecipeError(
            f"{name} fails on {PROMPTS} groups of {GROUP}:"
            f" {sanitize_text(f'{type(error).__name__}: {error}')}"
        ) from error
    # Also an array of booleans, which numpy would take as a mask, is refused.
    are_indices = np.issubdtype(samples.dtype, np.integer)
    if not are_indices or not set(samples.tolist()) <= set(range(PROMPTS * GROUP)):
        raise RecipeError(
            f"{name} returned {samples.tolist()}; return groups of indices of the {PROMPTS * GROUP}"
            " samples"
        )
    return groups


def _check_per_row(name: str, values: Mapping[str, Any], count: int) -> None:
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (count,):
            raise RecipeError(
                f"{name} returned {key} as {_describe_value(value)}; return a number for each of"
                f" the {count} rows, [{count}]"
            )
    num_wrong = int((~values["the loss"].isfinite()).sum())
    if num_wrong:
        raise RecipeError(
            f"{name} is not finite in {num_wrong} of {count} random rows:"
            f" {values['the loss'].tolist()}"
        )


def _check_gradient(name: str, loss: Tensor, velocity: Tensor) -> None:
    # A loss that was detached, or computed from the copies alone, trains nothing and says nothing.
    gradient = None
    if loss.requires_grad:
        gradient = torch.autograd.grad(loss.sum(), velocity, allow_unused=True)[0]
    if gradient is None or not gradient.any():
        raise RecipeError(
            f"{name} gives the prediction no gradient; compute it from rows.velocity, or"
            " rows.log_prob, undetached"
        )
    if not gradient.isfinite().all():
        raise RecipeError(f"{name} gives the prediction a gradient that is not finite")


def _name_of_function(function: Any) -> str:
    # A user's loss may be any callable, and an object has no name of its own.
    qualified_name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{qualified_name}"


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe_value, value))})"
    return f"a {type(value).__name__}"
