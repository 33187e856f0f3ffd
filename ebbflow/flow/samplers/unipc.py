r"""UniPC (2302.04867) of second order with B_2(h), the published solver of Wan, for rectified flow.

A predictor takes the step and, once the network has seen where it led, a corrector takes it again
with what it saw. With alpha = 1 - sigma, lambda = log(alpha / sigma), x0_hat = x - sigma v, h =
lambda' - lambda, r = (lambda_before - lambda) / h, D = (x0_before - x0_hat) / r and D' = x0_hat' -
x0_hat,

    predictor   x'  = (sigma' / sigma) x + (1 - sigma' / sigma) (x0_hat + D / 2)
    corrector   x'' = (sigma' / sigma) x + (1 - sigma' / sigma) (x0_hat + c D + c' D')

where c + c' = b and r c + c' = b' with p = e^-h - 1, b = -1 / h - 1 / p and b' = 2 ((p / h + 1) / h
- 1 / 2) / p. The predictor is that of ``dpm_solver``; the corrector costs no evaluation of the
network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.flow.sampler import Sampler, SolverHistory, at_least_float32, steps_to_zero

if TYPE_CHECKING:
    from torch import Tensor

FIRST_SIGMA = 1 - 1e-6
"""Stands for sigma = 1, whose lambda is infinite, as in the published schedule."""


class UniPC(Sampler):
    """Predicts with the last two steps, and corrects each step with the next prediction."""

    description = (
        "DPM-Solver++ with a corrector after each step (UniPC, 2302.04867), the published solver of"
        " Wan"
    )
    multistep = True

    def advance(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigmas: Tensor,
        step: int,
        history: SolverHistory | None,
    ) -> tuple[Tensor, SolverHistory]:
        """As ``Sampler.advance``, in float32 at least.

        The first step and the last are of first order, and so is the first correction.
        """
        # The second order is a difference of clean predictions, which bf16 would round away.
        latents = at_least_float32(latents)
        velocity = at_least_float32(velocity)
        sigmas = sigmas.to(latents).clamp(max=FIRST_SIGMA)
        # From the latents that the network has seen, before they are corrected, as published.
        clean = latents - sigmas[step] * velocity
        target = clean
        if history is not None:
            # The network has now seen where the step before led: take that step again.
            latents = _correct_latents(history, clean, sigmas, step)
            # Predictor: x0_hat + D / 2 with D = (x0_before - x0_hat) / r. The step to sigma' = 0
            # has an infinite lambda', so it is of first order.
            if not steps_to_zero(sigmas, step):
                target = clean + (history.clean - clean) / _compute_step_ratio(sigmas, step) / 2
        ratio = sigmas[step + 1] / sigmas[step]
        remembered = SolverHistory(latents, clean, history.clean if history else None)
        return ratio * latents + (1 - ratio) * target, remembered


def _correct_latents(history: SolverHistory, clean: Tensor, sigmas: Tensor, step: int) -> Tensor:
    """Compute the latents at sigmas[step] from those of the step before, once more, [N, ...]."""
    # In the names of the docstring, with the step before as the step: D' = x0_hat' - x0_hat, c' the
    # weight, c the slope. The first step has no D: c' = 1/2.
    change = clean - history.clean
    weight = clean.new_tensor(0.5)
    target = history.clean
    if history.previous_clean is not None:
        lambda_before, lambda_now = _compute_lambdas(sigmas)[step - 1 : step + 1]
        h = lambda_before - lambda_now  # as it enters the exponentials: negative
        ratio = _compute_step_ratio(sigmas, step - 1)
        phi = h.expm1()  # e^h - 1 would cancel for the short steps of a long schedule
        # Two equations for c and c': c + c' = b and r c + c' = b'.
        first = 1 / h - 1 / phi
        second = 2 * ((phi / h - 1) / h - 0.5) / phi
        slope = (first - second) / (1 - ratio)
        target = target + slope * (history.previous_clean - history.clean) / ratio
        weight = first - slope
    sigma_ratio = sigmas[step] / sigmas[step - 1]
    return sigma_ratio * history.latents + (1 - sigma_ratio) * (target + weight * change)


def _compute_step_ratio(sigmas: Tensor, step: int) -> Tensor:
    """Compute r of a step that has one before it."""
    steps = _compute_lambdas(sigmas)[step - 1 : step + 2].diff()
    return -steps[0] / steps[1]


def _compute_lambdas(sigmas: Tensor) -> Tensor:
    """Compute lambda = log((1 - sigma) / sigma), half the log of the signal-to-noise ratio."""
    return ((1 - sigmas) / sigmas).log()


SAMPLER = UniPC()
