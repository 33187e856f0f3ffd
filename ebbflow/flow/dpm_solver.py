r"""DPM-Solver++ (2M), the second-order multistep solver of the deterministic path (2211.01095), for
rectified flow.

With alpha = 1 - sigma, lambda = log(alpha / sigma), the clean prediction x0_hat = x - sigma v, and
x0_before that of the step before,

    h  = lambda' - lambda,   h_before = lambda - lambda_before,   D = x0_hat + h / (2 h_before)
    (x0_hat - x0_before) x' = (sigma' / sigma) x + alpha' (1 - exp(-h)) D,             alpha' (1 -
    exp(-h)) = 1 - sigma' / sigma

It needs the step before, so it is no ``ebbflow.flow.transition``; it costs one evaluation of the
network per step, as Euler does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ebbflow.flow.transition import at_least_float32
from ebbflow.flow.windows import count_tail_steps


def dpm_solver_step(
    latents: Tensor, velocity: Tensor, previous_clean: Tensor | None, sigmas: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """(the latents at sigmas[step + 1], the clean prediction that the next step takes as
    ``previous_clean``), both [N, ...].

    Args:
        latents: x at sigma = sigmas[step], [N, ...].
        velocity: the predicted v there, [N, ...].
        previous_clean: what the step before returned, [N, ...]; None where this solver starts.
        sigmas: the descending schedule, [steps + 1], ending in 0.
        step: the denoising step.

    The step is of first order, which is Euler's, where the solver starts and where it reaches sigma
    = 0 (h is infinite); and so is the one after a step from sigma = 1 (h_before is infinite).
    Computed in float32 at least.
    """
    latents = at_least_float32(latents)
    velocity = at_least_float32(velocity)
    sigmas = sigmas.to(latents)
    clean = latents - sigmas[step] * velocity
    target = clean
    if previous_clean is not None and sigmas[step + 1] > 0:
        before, now, after = torch.log((1 - sigmas) / sigmas)[step - 1 : step + 2]
        target = clean + (after - now) / (2 * (now - before)) * (clean - previous_clean)
    kept = sigmas[step + 1] / sigmas[step]
    return kept * latents + (1 - kept) * target, clean


def shorten_schedule(sigmas: Tensor, share: float) -> Tensor:
    """max(1, ceil(share * steps)) denoising steps instead of those of ``sigmas``, [steps + 1], from
    its first sigma to its last.

    They are spread evenly over its index, with linear interpolation, and so keep the family's
    spacing.
    """
    steps = len(sigmas) - 1
    places = np.linspace(0, steps, count_tail_steps(steps, share) + 1)
    return torch.from_numpy(np.interp(places, np.arange(steps + 1), sigmas.cpu().numpy())).to(
        sigmas
    )
