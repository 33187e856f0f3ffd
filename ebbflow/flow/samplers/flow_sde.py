"""Flow-SDE (Flow-GRPO, 2505.05470): noise that follows the schedule.

    s = eta sqrt(sigma / (1 - sigma~))

sigma~ is the second sigma of the schedule where sigma = 1, and sigma elsewhere. This guard at sigma
= 1 mis-scales the first noise for good (only the end of its path converges to the marginal); that
is the published sampler, kept as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.flow.sampler import Sampler, Transition

if TYPE_CHECKING:
    from torch import Tensor


class FlowSDE(Sampler):
    """Injects much noise at high sigmas and little at low ones."""

    description = "noise that follows the schedule (Flow-GRPO, 2505.05470); eta .7"
    eta = 0.7

    def step(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
    ) -> Transition:
        sigma = sigmas[step]
        # Where sigma = 1, 1 - sigma is 0; published code takes the second sigma there.
        guarded = sigma.where(sigma < 1, sigmas[1])
        scale = eta * (sigma / (1 - guarded)).sqrt()
        return self.sde_transition(latents, velocity, sigmas, step, scale)


SAMPLER = FlowSDE()
