"""A sampler whose noise fades with the noise level of the path: s = eta sigma."""

from __future__ import annotations

from torch import Tensor

from ebbflow.flow.sampler import Sampler, Transition


class Fading(Sampler):
    """Injects much noise at the start of the path and none at its end."""

    eta = 0.5

    def step(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
    ) -> Transition:
        """Compute the transition of the latents, [N, ...], at a denoising step."""
        return self.sde_transition(latents, velocity, sigmas, step, scale=eta * sigmas[step])


FADING = Fading()
