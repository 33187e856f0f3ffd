"""One denoising step, for every sampler: the same function samples it and scores it."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor

from ebbflow.flow.latents import Shape, average_elements
from ebbflow.flow.sampler import Sampler, Transition, at_least_float32, broadcast_rows
from ebbflow.recipe.plugins import import_object
from ebbflow.recipe.samplers import SAMPLERS


def find_sampler(name: str) -> Sampler:
    """Return the sampler that a recipe names: one of ``ebbflow/flow/samplers`` by the name of its
    file, or a user's own by its path.

    Raises:
        RecipeError: nothing can be imported from the path.
    """
    sampler = SAMPLERS[name] if name in SAMPLERS else import_object(name)
    return cast(Sampler, sampler)  # the recipe has rejected everything else


def compute_transition(
    sampler: str,
    latents: Tensor,
    velocity: Tensor,
    sigmas: Tensor,
    step: int | Tensor,
    eta: float | None = None,
) -> Transition:
    """Compute the transition of ``latents`` at denoising step ``step``.

    Everything is computed in float32 at least: bf16 latents alone move the first ratio off 1.

    Args:
        sampler: its name, or the path of a user's own; a single-step one.
        latents: x at sigma = sigmas[step], [N, ...].
        velocity: the predicted v there, [N, ...].
        sigmas: the descending schedule, [steps + 1], ending in 0.
        step: one step for all rows, or an integer tensor [N] with a step for each.
        eta: noise level; None takes the sampler's published default.
    """
    chosen = find_sampler(sampler)
    # Here and not in each sampler, so that a user's own is in float32, too.
    latents = at_least_float32(latents)
    velocity = at_least_float32(velocity)
    if eta is None:
        eta = chosen.eta or 0.0
    return chosen.step(latents, velocity, sigmas.to(latents), step, eta)


def sample_next_latents(transition: Transition, noise: Tensor) -> Tensor:
    """Compute x' = mu + b z for the given z, [N, ...]."""
    return transition.mean + broadcast_rows(transition.std, transition.mean) * noise


def compute_log_prob(transition: Transition, next_latents: Tensor, shape: Shape = ()) -> Tensor:
    """Compute the log-probability of x', [N]: the MEAN over the D elements of a sample, as in all
    published code; of a sample of K latents, [N, K], the mean over the elements of each.

    The mean (not the sum) is why clip ranges are 1e-3 ... 1e-6; multiply by D for the log-density.
    Where the sampler's log-prob is no density, it is -mean((x' - mu)^2), without 1/(2 b^2) and the
    normaliser.

    Args:
        shape: of a sample, ``Model.latent_shape``. Left out, a sample is one latent.

    Raises:
        ValueError: the step is deterministic (b = 0) and has no density; not on a GPU.
    """
    # Dividing by b = 0 would give NaN, which training would only notice in the loss. A GPU is not
    # asked, as each denoising step would wait for it; there the update names the row.
    if transition.std.device.type == "cpu" and not bool((transition.std > 0).all()):
        raise ValueError(
            f"a deterministic step of the {transition.sampler.name} sampler has no log-probability;"
            " score stochastic ones"
        )
    squared = (next_latents - transition.mean) ** 2  # [N, ...]
    # CPS as published: -mean((x' - mu)^2).
    if not transition.sampler.log_prob_is_density:
        return average_elements(-squared, shape)
    # log N(x'; mu, b^2), elementwise: -(x' - mu)^2 / (2 b^2) - log b - log(2 pi) / 2.
    std = broadcast_rows(transition.std, transition.mean)
    densities = -squared / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return average_elements(densities, shape)
