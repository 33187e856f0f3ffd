"""Coefficients-preserving sampling (2509.05952): a^2 + b^2 = sigma'^2, so that the noise level of
x' is that of the path, and no grain is left in the image.

Its published log-prob, -mean((x' - mu)^2), leaves out 1 / (2 b^2) and is no density.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ebbflow.flow.sampler import Sampler, Transition

if TYPE_CHECKING:
    from torch import Tensor


class CPS(Sampler):
    """Replaces a share of the noise: eta = 1 replaces all of it."""

    description = "keeps the noise level of the path, so that no grain is left (2509.05952); eta .8"
    eta = 0.8
    max_eta = 1.0  # the noise, sin(eta pi / 2), falls again above
    log_prob_is_density = False
    std_has_dt = False

    def step(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
    ) -> Transition:
        sigma = sigmas[step]
        sigma_next = sigmas[step + 1]
        dt = sigma_next - sigma
        # b = sigma' sin(eta pi / 2),   a = sqrt(sigma'^2 - b^2): the share of the noise that is
        # replaced, and the share that stays. b has no dt in it.
        std = sigma_next * math.sin(eta * math.pi / 2)
        # Rounding may leave a tiny negative number at eta = 1.
        noise_share = (sigma_next**2 - std**2).clamp_min(0).sqrt()
        # s = b / sqrt|dt|, so that b = s sqrt|dt| holds for this sampler, too.
        scale = std / dt.abs().sqrt()
        transition = self.sde_transition(latents, velocity, sigmas, step, scale, noise_share)
        # b itself, and not as s sqrt|dt|, which rounds.
        return replace(transition, std=std)


SAMPLER = CPS()
