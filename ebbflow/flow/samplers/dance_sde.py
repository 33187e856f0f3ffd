"""Dance-SDE (DanceGRPO, 2505.07818): the same noise per square root of time at every step,
s = eta.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.flow.sampler import Sampler, Transition

if TYPE_CHECKING:
    from torch import Tensor


class DanceSDE(Sampler):
    """Injects the same noise everywhere."""

    description = "the same noise at every step (DanceGRPO, 2505.07818); eta .3"
    eta = 0.3

    def step(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
    ) -> Transition:
        # s = eta, in the shape of sigma: a scalar, or a value for each row.
        scale = sigmas[step].new_full(sigmas[step].shape, eta)
        return self.sde_transition(latents, velocity, sigmas, step, scale)


SAMPLER = DanceSDE()
