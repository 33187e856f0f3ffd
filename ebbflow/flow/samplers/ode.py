"""Euler steps of the probability-flow ODE: a = sigma', b = 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.flow.sampler import Sampler, Transition

if TYPE_CHECKING:
    from torch import Tensor


class Ode(Sampler):
    """Takes Euler steps: the same as an SDE without noise."""

    description = "deterministic Euler steps"

    def step(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
    ) -> Transition:
        # With s = 0 an SDE has a = sigma' and b = 0: x' = (1 - sigma') x0_hat + sigma' x1_hat,
        # which is x + dt v.
        no_noise = sigmas[step].new_zeros(sigmas[step].shape)
        return self.sde_transition(latents, velocity, sigmas, step, no_noise)


SAMPLER = Ode()
