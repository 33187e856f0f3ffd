"""One call of a loss on random rows, so that a user's own algorithm fails in a second instead of
after the first rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import (
    Algorithm,
    DirectAlignRows,
    ForwardRows,
    GradientRows,
    MatchingRows,
    TrajectoryRows,
    expand_like,
    mean_per_row,
)
from ebbflow.flow.transition import compute_log_prob, compute_transition, sample_next_latents
from ebbflow.recipe.algorithms import AlgorithmConfig, DirectAlignConfig
from ebbflow.recipe.base import RecipeError, sanitize_text

PROMPTS = 2
GROUP = 4
LATENT = (1, 4, 4)
STEPS = 6
SAMPLER = "flow_sde"
DISTANCE = 0.05
"""Standard deviation of the velocity of a copy from that of the policy."""


def try_loss(path: str, algorithm: Algorithm, hyper: AlgorithmConfig) -> None:
    """Call the selection and the loss of an algorithm on random rows, and check what they return.

    Args:
        path: what the recipe calls it.

    Raises:
        RecipeError: one of them fails, the loss is not a finite number for each row, or no gradient
            reaches the prediction.
    """
    groups = _try_selection(path, algorithm, hyper)
    makers = {
        "forward": _build_forward_rows,
        "trajectory": _build_trajectory_rows,
        "gradient": _build_gradient_rows,
        "matching": _build_matching_rows,
    }
    make = _build_direct_align_rows if isinstance(hyper, DirectAlignConfig) else makers[hyper.kind]
    rows, velocity = make(groups, algorithm, hyper)
    count = len(velocity)
    name = f"the loss of {path}, {_name_of_function(algorithm.loss)},"
    try:
        returned: Any = algorithm.loss(rows, hyper)
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
    if not np.issubdtype(samples.dtype, np.integer) or not set(samples.tolist()) <= set(
        range(PROMPTS * GROUP)
    ):
        raise RecipeError(
            f"{name} returned {samples.tolist()}; return groups of indices of the {PROMPTS * GROUP}"
            " samples"
        )
    return groups


def _build_forward_rows(
    groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
) -> tuple[ForwardRows, Tensor]:
    """The rows, and the prediction in them."""
    draw, advantage, index = _sample_random_inputs(groups)
    shared = index if hyper.shared_noise else torch.arange(len(index))
    velocity = draw().requires_grad_()
    rows = ForwardRows(
        clean=draw(),
        noise=draw()[shared],
        sigma=torch.linspace(0.1, 0.9, len(groups))[index],
        velocity=velocity,
        copies={copy: velocity.detach() + DISTANCE * draw() for copy in algorithm.copies(hyper)},
        advantage=advantage,
        group_index=index,
    )
    return rows, velocity


def _build_trajectory_rows(
    groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
) -> tuple[TrajectoryRows, Tensor]:
    """The rows, of the policy that made the samples, and the prediction in them."""
    draw, advantage, index = _sample_random_inputs(groups)
    latents = draw()
    velocity = draw().requires_grad_()
    sigmas = torch.linspace(1, 0, STEPS + 1)
    steps = torch.arange(len(index)) % (STEPS - 1)
    old = compute_transition(SAMPLER, latents, velocity.detach(), sigmas, steps)
    step = compute_transition(SAMPLER, latents, velocity, sigmas, steps)
    after = sample_next_latents(old, draw())
    copies = {
        copy: compute_transition(
            SAMPLER, latents, velocity.detach() + DISTANCE * draw(), sigmas, steps
        )
        for copy in algorithm.copies(hyper)
    }
    return (
        TrajectoryRows(
            step,
            compute_log_prob(step, after),
            old.mean,
            compute_log_prob(old, after),
            copies,
            advantage,
        ),
        velocity,
    )


def _build_gradient_rows(
    groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
) -> tuple[GradientRows, Tensor]:
    """The rows, with a reward that is best at 0, and the prediction in them."""
    draw, advantage, _ = _sample_random_inputs(groups)
    latents = draw()
    velocity = draw().requires_grad_()
    sigma = torch.full((len(advantage),), 0.3)
    rows = GradientRows(
        latents=latents,
        sigma=sigma,
        velocity=velocity,
        denoise=lambda v: latents - expand_like(sigma, v) * v,
        reward=lambda clean: -mean_per_row(clean**2),
        copies={copy: velocity.detach() + DISTANCE * draw() for copy in algorithm.copies(hyper)},
        advantage=advantage,
    )
    return rows, velocity


def _build_direct_align_rows(
    groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
) -> tuple[DirectAlignRows, Tensor]:
    """The rows of a denoising branch, with rewards that are best at 0, and the prediction in
    them."""
    draw, advantage, _ = _sample_random_inputs(groups)
    velocity = draw().requires_grad_()
    sigma = torch.full((len(advantage),), hyper.max_sigma)
    rows = DirectAlignRows(
        clean=draw(),
        noise=draw(),
        sigma=sigma,
        end_sigma=torch.full_like(sigma, hyper.min_sigma),
        velocity=velocity,
        rewards=lambda clean: (-mean_per_row(clean**2), -mean_per_row(clean**2) / 2),
        copies={copy: velocity.detach() + DISTANCE * draw() for copy in algorithm.copies(hyper)},
        advantage=advantage,
    )
    return rows, velocity


def _build_matching_rows(
    groups: list[np.ndarray], algorithm: Algorithm, hyper: Any
) -> tuple[MatchingRows, Tensor]:
    """The rows of a student's first step, and the prediction in them."""
    draw, advantage, _ = _sample_random_inputs(groups)
    velocity = draw().requires_grad_()
    level = torch.linspace(0.1, 0.9, len(advantage))
    rows = MatchingRows(
        latents=draw(),
        sigma=torch.ones(len(advantage)),
        velocity=velocity,
        noised=draw(),
        noised_sigma=level,
        copies={copy: draw() for copy in algorithm.copies(hyper)},
        advantage=advantage,
    )
    return rows, velocity


def _sample_random_inputs(groups: list[np.ndarray]) -> tuple[Any, Tensor, Tensor]:
    """(function that draws normal numbers [M, ...], advantages [M], group of each row [M])."""
    index = torch.from_numpy(np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    advantage = torch.from_numpy(
        np.tile(np.linspace(1, -1, GROUP), PROMPTS)[np.concatenate(groups)]
    ).float()
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.randn(len(index), *LATENT, generator=generator), advantage, index


def _check_per_row(name: str, values: Mapping[str, Any], count: int) -> None:
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (count,):
            raise RecipeError(
                f"{name} returned {key} as {_describe_value(value)}; return a number for each of"
                f" the {count} rows, [{count}]"
            )
    if wrong := int((~values["the loss"].isfinite()).sum()):
        raise RecipeError(
            f"{name} is not finite in {wrong} of {count} random rows: {values['the loss'].tolist()}"
        )


def _check_gradient(name: str, loss: Tensor, velocity: Tensor) -> None:
    gradient = (
        torch.autograd.grad(loss.sum(), velocity, allow_unused=True)[0]
        if loss.requires_grad
        else None
    )
    if gradient is None or not gradient.any():
        raise RecipeError(
            f"{name} gives the prediction no gradient; compute it from rows.velocity, or"
            " rows.log_prob, undetached"
        )
    if not gradient.isfinite().all():
        raise RecipeError(f"{name} gives the prediction a gradient that is not finite")


def _name_of_function(function: Any) -> str:
    module = getattr(function, "__module__", "")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}:{name}"


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe_value, value))})"
    return f"a {type(value).__name__}"
