r"""One denoising step, for every sampler: the same function samples it and scores it.

With the rectified-flow convention x_sigma = (1 - sigma) x0 + sigma eps and the predicted velocity v
= eps - x0,

    x0_hat = x - sigma v,   x1_hat = x + (1 - sigma) v, mu     = (1 - sigma') x0_hat + a x1_hat,
    x' = mu + b z,   z ~ N(0, I),   dt = sigma' - sigma < 0

============  ========================================  =====================  ===========
sampler       a                                         b                      default eta
============  ========================================  =====================  ===========
``ode``       sigma'                                    0                      --
``flow_sde``  sigma' - s^2 |dt| / (2 sigma)             s sqrt|dt|             .7
``dance_sde`` sigma' - s^2 |dt| / (2 sigma)             s sqrt|dt|             .3
``cps``       sqrt(sigma'^2 - b^2)                      sigma' sin(eta pi/2)   .8
============  ========================================  =====================  ===========

s = eta sqrt(sigma / (1 - sigma~)) for Flow-SDE (Flow-GRPO, 2505.05470), with sigma~ the second
sigma of the schedule where sigma = 1; s = eta for Dance-SDE (DanceGRPO, 2505.07818); CPS is
2509.05952. Flow-SDE's guard at sigma = 1 mis-scales the first noise for good (only the end of its
path converges to the marginal); that is the published sampler, kept as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ebbflow.recipe.plugins import import_object

DEFAULT_ETA = {"ode": 0.0, "flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8}


@dataclass(frozen=True)
class Transition:
    """The Gaussian N(mean, std^2 I) of the next latent.

    Attributes:
        sampler: its name, or the path of a user's own.
        mean: [N, ...].
        std: b, the TRUE standard deviation, dt included; scalar or [N], 0 where the step is
            deterministic.
        scale: s, the noise per square root of time (b = s sqrt|dt|); scalar or [N].
        dt: sigma' - sigma, negative; scalar or [N].
    """

    sampler: str
    mean: Tensor
    std: Tensor
    scale: Tensor
    dt: Tensor


@dataclass(frozen=True)
class Sampler:
    """A user's own sampler, which a recipe names as ``sampler: {name: "package.module:NAME"}``.

    Attributes:
        step: (latents [N, ...], velocity [N, ...], sigmas [steps + 1], step, eta) -> the transition
            of that denoising step, computed in float32 at least. ``step`` is one step for all rows,
            or an integer tensor [N]. Rollouts sample it and training scores it again, so it must
            depend on its arguments alone. ``sde_transition`` computes most of them.
        eta: the default noise level; None: deterministic (``Transition.std`` is 0), without
            log-probs.
    """

    step: Callable[[Tensor, Tensor, Tensor, int | Tensor, float], Transition]
    eta: float | None


def compute_transition(
    sampler: str,
    latents: Tensor,
    velocity: Tensor,
    sigmas: Tensor,
    step: int | Tensor,
    eta: float | None = None,
) -> Transition:
    """The transition of ``latents`` at denoising step ``step``.

    Args:
        latents: x at sigma = sigmas[step], [N, ...].
        velocity: the predicted v there, [N, ...].
        sigmas: the descending schedule, [steps + 1], ending in 0.
        step: one step for all rows, or an integer tensor [N] with a step for each.
        eta: noise level; None takes the sampler's published default.

    Everything is computed in float32 at least: bf16 latents alone move the first ratio off 1.
    """
    latents = at_least_float32(latents)
    velocity = at_least_float32(velocity)
    sigmas = sigmas.to(latents)
    if ":" in sampler:
        own: Sampler = import_object(sampler)
        return replace(
            own.step(latents, velocity, sigmas, step, (own.eta or 0.0) if eta is None else eta),
            sampler=sampler,
        )
    eta = DEFAULT_ETA[sampler] if eta is None else eta
    sigma = sigmas[step]
    sigma_next = sigmas[step + 1]
    dt = sigma_next - sigma
    scale, std = _compute_noise_scale(sampler, eta, sigma, sigma_next, dt, second_sigma=sigmas[1])
    # a^2 + b^2 = sigma'^2 for ODE and CPS; the SDEs correct the drift for the noise they inject.
    noise_share = sigma_next**2 - std**2 if sampler == "cps" else None
    a = (
        sigma_next - scale**2 * dt.abs() / (2 * sigma)
        if noise_share is None
        else noise_share.clamp_min(0).sqrt()
    )
    return Transition(
        sampler, _compute_mean(latents, velocity, sigma, sigma_next, a), std, scale, dt
    )


def sde_transition(
    latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, scale: Tensor
) -> Transition:
    """The transition of an SDE with the noise ``scale`` s of this step (scalar or [N]); the drift
    is corrected for the noise.
    """
    sigma = sigmas[step]
    sigma_next = sigmas[step + 1]
    dt = sigma_next - sigma
    a = sigma_next - scale**2 * dt.abs() / (2 * sigma)
    return Transition(
        "sde",
        _compute_mean(latents, velocity, sigma, sigma_next, a),
        scale * dt.abs().sqrt(),
        scale,
        dt,
    )


def _compute_mean(
    latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, a: Tensor
) -> Tensor:
    """mu = (1 - sigma') x0_hat + a x1_hat, [N, ...]."""
    clean = latents - _broadcast_rows(sigma, latents) * velocity
    noise = latents + _broadcast_rows(1 - sigma, latents) * velocity
    return _broadcast_rows(1 - sigma_next, latents) * clean + _broadcast_rows(a, latents) * noise


def _compute_noise_scale(
    sampler: str, eta: float, sigma: Tensor, sigma_next: Tensor, dt: Tensor, second_sigma: Tensor
) -> tuple[Tensor, Tensor]:
    """(s, b) of a step."""
    if sampler == "ode":
        return torch.zeros_like(sigma), torch.zeros_like(sigma)
    if sampler == "cps":
        std = sigma_next * math.sin(eta * math.pi / 2)
        return std / dt.abs().sqrt(), std
    if sampler == "flow_sde":
        guarded = torch.where(sigma >= 1, second_sigma, sigma)
        scale = eta * (sigma / (1 - guarded)).sqrt()
    else:
        scale = torch.full_like(sigma, eta)
    return scale, scale * dt.abs().sqrt()


def sample_next_latents(step: Transition, noise: Tensor) -> Tensor:
    """x' = mu + b z for the given z, [N, ...]."""
    return step.mean + _broadcast_rows(step.std, step.mean) * noise


def compute_log_prob(step: Transition, next_latents: Tensor) -> Tensor:
    """Log-probability of x', [N]: the MEAN over the D elements of a sample, as in all published
    code.

    The mean (not the sum) is why clip ranges are 1e-3 ... 1e-6; multiply by D for the log-density.
    CPS follows its publication, -mean((x' - mu)^2), without 1/(2 b^2) and the normaliser.

    Raises:
        ValueError: the step is deterministic (b = 0) and has no density.
    """
    if not bool((step.std > 0).all()):
        raise ValueError(
            f"a deterministic step of the {step.sampler} sampler has no log-probability; score"
            " stochastic ones"
        )
    squared = (next_latents - step.mean) ** 2
    if step.sampler == "cps":
        return -_mean_per_sample(squared)
    std = _broadcast_rows(step.std, step.mean)
    return _mean_per_sample(-squared / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi))


def _mean_per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


def _broadcast_rows(value: Tensor, like: Tensor) -> Tensor:
    """A scalar as it is, [N] as [N, 1, ...], so that it broadcasts over the rows of ``like``."""
    return value if value.ndim == 0 else value.view(-1, *[1] * (like.ndim - 1))


def at_least_float32(value: Tensor) -> Tensor:
    """float64 as it is, everything else as float32."""
    return value if value.dtype == torch.float64 else value.float()
