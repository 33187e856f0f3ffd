r"""DPM-Solver++ (2M), the second-order multistep solver of the deterministic path (2211.01095), for
rectified flow.

With alpha = 1 - sigma, lambda = log(alpha / sigma), the clean prediction x0_hat = x - sigma v, and
x0_before that of the step before,

    h  = lambda' - lambda,   h_before = lambda - lambda_before
    D  = x0_hat + h / (2 h_before) (x0_hat - x0_before)
    x' = (sigma' / sigma) x + alpha' (1 - exp(-h)) D,   alpha' (1 - exp(-h)) = 1 - sigma' / sigma

It needs the step before, so it has no transition; it costs one evaluation of the network per step,
as Euler does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.flow.sampler import Sampler, SolverHistory, at_least_float32, steps_to_zero

if TYPE_CHECKING:
    from torch import Tensor


class DPMSolver(Sampler):
    """Extrapolates the clean prediction from the last two steps."""

    description = (
        "deterministic second-order DPM-Solver++ (2211.01095): closer to the exact path in few"
        " steps"
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

        The step is of first order, which is Euler's, where the solver starts and where it reaches
        sigma = 0 (h is infinite); and so is the one after a step from sigma = 1 (h_before is
        infinite).
        """
        # The second order is a difference of clean predictions, which bf16 would round away.
        latents = at_least_float32(latents)
        velocity = at_least_float32(velocity)
        sigmas = sigmas.to(latents)
        clean = latents - sigmas[step] * velocity
        target = clean
        if history is not None and not steps_to_zero(sigmas, step):
            # D = x0_hat + h / (2 h_before) (x0_hat - x0_before). After a step from sigma = 1
            # h_before is infinite, the factor 0, and the step of first order by itself.
            lambdas = ((1 - sigmas) / sigmas).log()
            before, now, after = lambdas[step - 1 : step + 2]
            slope = (after - now) / (2 * (now - before))
            target = clean + slope * (clean - history.clean)
        # x' = (sigma' / sigma) x + (1 - sigma' / sigma) D: without logarithms, so that sigma' = 0
        # is no special case.
        ratio = sigmas[step + 1] / sigmas[step]
        return ratio * latents + (1 - ratio) * target, SolverHistory(latents, clean)


SAMPLER = DPMSolver()
