"""A sampler whose noise fades with the noise level of the path: s = eta sigma."""

from __future__ import annotations

from torch import Tensor

from ebbflow.flow.transition import Sampler, Transition, sde_transition


def step(
    latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
) -> Transition:
    """The transition of the latents, [N, ...], at a denoising step."""
    return sde_transition(latents, velocity, sigmas, step, scale=eta * sigmas[step])


FADING = Sampler(step, eta=0.5)
