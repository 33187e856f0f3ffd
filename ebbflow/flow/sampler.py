r"""What a sampler is: its steps, and the facts that a recipe is checked against.

With the rectified-flow convention x_sigma = (1 - sigma) x0 + sigma eps and the predicted velocity v
= eps - x0, every single-step sampler moves from sigma to sigma' < sigma by

    x0_hat = x - sigma v,   x1_hat = x + (1 - sigma) v
    mu     = (1 - sigma') x0_hat + a x1_hat
    x'     = mu + b z,      z ~ N(0, I),   dt = sigma' - sigma < 0

and chooses a and b. ``ebbflow/flow/samplers`` has one file for each sampler that a recipe can name;
a user's own is named by its path and is an object of the same class.

Nothing here imports torch at the top, because reading a recipe looks the samplers up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Transition:
    """The Gaussian N(mean, std^2 I) of the next latent.

    Example:
        For 2 samples of shape [16, 64, 64], one step of Flow-SDE has a mean [2, 16, 64, 64] and a
        scalar std; rows of different steps, as training has them, have a std [2].

    Attributes:
        sampler: whose step it is.
        mean: [N, ...].
        std: b, the TRUE standard deviation, dt included; scalar or [N], 0 where the step is
            deterministic.
        scale: s, the noise per square root of time (b = s sqrt|dt|); scalar or [N].
        dt: sigma' - sigma, negative; scalar or [N].
    """

    sampler: Sampler
    mean: Tensor
    std: Tensor
    scale: Tensor
    dt: Tensor


@dataclass(frozen=True)
class SolverHistory:
    """What a multistep solver remembers of the step before.

    Example:
        After the step from sigma = .96 to .91 of 2 samples of shape [16, 64, 64]: ``latents`` are x
        at .96, ``clean`` is x - .96 v there, both [2, 16, 64, 64], and ``previous_clean`` is the
        clean prediction at the sigma before .96.

    Attributes:
        latents: x where that step began, as the solver corrected it, [N, ...].
        clean: x0_hat there, [N, ...].
        previous_clean: x0_hat of the step before that one; None where it was the first.
    """

    latents: Tensor
    clean: Tensor
    previous_clean: Tensor | None = None


class Sampler:
    """How latents are denoised. A sampler of one's own subclasses it and implements ``step``.

    Example:
        class Fading(Sampler):
            eta = 0.5

            def step(self, latents, velocity, sigmas, step, eta):
                return self.sde_transition(latents, velocity, sigmas, step, eta * sigmas[step])

        FADING = Fading()  # the recipe says sampler: {name: "package.module:FADING"}

    Attributes:
        description: what the help of the recipe says about it.
        eta: the default noise level; None: deterministic, without log-probs.
        max_eta: the largest noise level that means something.
        log_prob_is_density: whether ``compute_log_prob`` gives the logarithm of a density. Else it
            is -mean((x' - mu)^2), and no threshold on it has a unit.
        std_has_dt: whether b = s sqrt|dt|, so that dividing a KL by dt makes it comparable between
            steps.
        multistep: whether a step needs the one before it; then there is no ``step``.
    """

    description: str = "of your own"
    eta: float | None = None
    max_eta: float = 2.0
    log_prob_is_density: bool = True
    std_has_dt: bool = True
    multistep: bool = False

    @property
    def name(self) -> str:
        """The name of its file, which is how a recipe calls those of Ebbflow."""
        return type(self).__module__.rpartition(".")[2]

    def step(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, eta: float
    ) -> Transition:
        """Compute the transition of the latents at a denoising step.

        Rollouts sample it and training scores it again, so it must depend on its arguments alone.

        Args:
            latents: x at sigma = sigmas[step], [N, ...], float32 at least, as everything else.
            velocity: the predicted v there, [N, ...].
            sigmas: the descending schedule, [steps + 1], ending in 0.
            step: one step for all rows, or an integer tensor [N] with a step for each.
            eta: the noise level.
        """
        raise NotImplementedError(f"the sampler {self.name} has no step() of its own")

    def advance(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigmas: Tensor,
        step: int,
        history: SolverHistory | None,
    ) -> tuple[Tensor, SolverHistory]:
        """Take a step without noise: (the latents at sigmas[step + 1], what the next step needs).

        Args:
            history: what the step before returned; None where the solver starts.
        """
        # With eta = 0 single-step samplers are Euler steps: a = sigma' and b = 0.
        mean = self.step(latents, velocity, sigmas, step, eta=0.0).mean
        return mean, remember_step(latents, velocity, sigmas[step], history)

    def sde_transition(
        self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int | Tensor, scale: Tensor
    ) -> Transition:
        """Compute the transition of an SDE with the noise ``scale`` s of this step, scalar or [N].

        The drift is corrected for the noise that the step injects, so that x' has the marginal of
        sigma': a = sigma' - s^2 |dt| / (2 sigma), b = s sqrt|dt|.
        """
        sigma = sigmas[step]
        sigma_next = sigmas[step + 1]
        dt = sigma_next - sigma
        # a = sigma' - s^2 |dt| / (2 sigma), b = s sqrt|dt|. a^2 + b^2 is above sigma'^2 by about
        # s^2 dt^2 / sigma: late steps of a shifted schedule are long, and leave grain in the image.
        noise_share = sigma_next - scale**2 * dt.abs() / (2 * sigma)
        mean = mix_predictions(latents, velocity, sigma, sigma_next, noise_share)
        return Transition(self, mean, scale * dt.abs().sqrt(), scale, dt)


def remember_step(
    latents: Tensor, velocity: Tensor, sigma: Tensor, history: SolverHistory | None
) -> SolverHistory:
    """Return what a solver that takes over after this single step needs: MixGRPO's code, too,
    begins its tail with the last stochastic step as history.
    """
    clean = latents - sigma * velocity
    return SolverHistory(latents, clean, history.clean if history else None)


def steps_to_zero(sigmas: Tensor, step: int) -> bool:
    """Return whether a step ends at sigma 0, as the last one of a whole schedule does."""
    # Not at the top of the file: reading a recipe imports it, and must not load torch.
    from ebbflow.flow.host_values import read_on_host

    return step + 2 == len(sigmas) and float(read_on_host(sigmas)[-1]) == 0


def mix_predictions(
    latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, noise_share: Tensor
) -> Tensor:
    """Compute mu = (1 - sigma') x0_hat + a x1_hat, [N, ...], with ``noise_share`` a."""
    # x0_hat = x - sigma v,   x1_hat = x + (1 - sigma) v
    clean = latents - broadcast_rows(sigma, latents) * velocity
    noise = latents + broadcast_rows(1 - sigma, latents) * velocity
    return (
        broadcast_rows(1 - sigma_next, latents) * clean
        + broadcast_rows(noise_share, latents) * noise
    )


def broadcast_rows(value: Tensor, like: Tensor) -> Tensor:
    """Return a scalar as it is and [N] as [N, 1, ...], so that it broadcasts over the rows of
    ``like``.
    """
    return value if value.ndim == 0 else value.view((-1,) + (1,) * (like.ndim - 1))


def at_least_float32(value: Tensor) -> Tensor:
    """Return float64 as it is, and everything else as float32."""
    # Not at the top of the file: reading a recipe imports it, and must not load torch.
    import torch

    return value if value.dtype == torch.float64 else value.float()
