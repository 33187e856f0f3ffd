r"""UniPC (2302.04867) of second order with B_2(h), the published solver of Wan, for rectified flow.

A predictor takes the step and, once the network has seen where it led, a corrector takes it again
with what it saw. With alpha = 1 - sigma, lambda = log(alpha / sigma), x0_hat = x - sigma v, h =
lambda' - lambda, r = (lambda_before - lambda) / h, D = (x0_before - x0_hat) / r and D' = x0_hat' -
x0_hat,

    predictor   x'  = (sigma' / sigma) x + (1 - sigma' / sigma) (x0_hat + D / 2)
    corrector   x'' = (sigma' / sigma) x + (1 - sigma' / sigma) (x0_hat + c D + c' D')

where c + c' = b and r c + c' = b' with p = e^-h - 1, b = -1 / h - 1 / p and b' = 2 ((p / h + 1) / h
- 1 / 2) / p. The predictor is that of ``ebbflow.flow.dpm_solver``; the corrector costs no
evaluation of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbflow.flow.transition import at_least_float32

FIRST_SIGMA = 1 - 1e-6
"""Stands for sigma = 1, whose lambda is infinite, as in the published schedule."""


@dataclass(frozen=True)
class UniPCHistory:
    """What the next step needs, each [N, ...]: the corrected latents of a step, and its clean
    prediction and the one before.
    """

    latents: Tensor
    clean: Tensor
    clean_before: Tensor | None


def unipc_step(
    latents: Tensor, velocity: Tensor, history: UniPCHistory | None, sigmas: Tensor, step: int
) -> tuple[Tensor, UniPCHistory]:
    """(the latents at sigmas[step + 1], what the next step takes as ``history``).

    Args:
        latents: x at sigma = sigmas[step], [N, ...], where the step before led.
        velocity: the predicted v there, [N, ...].
        history: what the step before returned; None for the first.
        sigmas: the descending schedule, [steps + 1], ending in 0.
        step: the denoising step.

    The first step and the last are of first order, and so is the first correction. Computed in
    float32 at least.
    """
    latents = at_least_float32(latents)
    velocity = at_least_float32(velocity)
    sigmas = sigmas.to(latents).clamp(max=FIRST_SIGMA)
    clean = latents - sigmas[step] * velocity
    if history is not None:
        latents = _correct_latents(history, clean, sigmas, step)
    target = clean
    if history is not None and sigmas[step + 1] > 0:
        target = clean + (history.clean - clean) / _compute_step_ratio(sigmas, step) / 2
    kept = sigmas[step + 1] / sigmas[step]
    after = UniPCHistory(latents, clean, history.clean if history else None)
    return kept * latents + (1 - kept) * target, after


def _correct_latents(history: UniPCHistory, clean: Tensor, sigmas: Tensor, step: int) -> Tensor:
    """The latents at sigmas[step] from those of the step before, once more."""
    change = clean - history.clean
    weight = torch.tensor(0.5).to(clean)
    target = history.clean
    if history.clean_before is not None:
        before, now = _compute_lambdas(sigmas)[step - 1 : step + 1]
        h, ratio = (
            before - now,
            _compute_step_ratio(sigmas, step - 1),
        )  # h as it enters the exponentials: negative
        phi = torch.expm1(h)
        first = 1 / h - 1 / phi
        second = 2 * ((phi / h - 1) / h - 0.5) / phi
        slope = (first - second) / (1 - ratio)
        target = target + slope * (history.clean_before - history.clean) / ratio
        weight = first - slope
    kept = sigmas[step] / sigmas[step - 1]
    return kept * history.latents + (1 - kept) * (target + weight * change)


def _compute_step_ratio(sigmas: Tensor, step: int) -> Tensor:
    """r of a step that has one before it."""
    steps = _compute_lambdas(sigmas)[step - 1 : step + 2].diff()
    return -steps[0] / steps[1]


def _compute_lambdas(sigmas: Tensor) -> Tensor:
    return torch.log((1 - sigmas) / sigmas)
