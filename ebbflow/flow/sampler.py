r"""One denoising step, for every sampler: the same functions sample it and score it.

With the rectified-flow convention x_sigma = (1 - sigma) x0 + sigma eps and the predicted velocity v
= eps - x0, every single-step sampler moves from sigma to sigma' < sigma by

    x0_hat = x - sigma v,   x1_hat = x + (1 - sigma) v
    mu     = (1 - sigma') x0_hat + a x1_hat
    x'     = mu + b z,      z ~ N(0, I),   dt = sigma' - sigma < 0

and chooses a and b. ``ebbflow/flow/samplers`` has one file for each sampler that a recipe can name;
a user's own is named by its path and is an object of the same class. ``compute_transition`` gives
mu and b, ``sample_next_latents`` x', and ``compute_log_prob`` how probable x' is.

Nothing here imports torch at the top, because reading a recipe looks the samplers up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ebbflow.flow.latents import NamedLatents, Shape

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
    ) -> tuple[Tensor, SolverHistory | None]:
        """Take a step without noise: (the latents at sigmas[step + 1], what a multistep solver
        needs at the next step).

        Args:
            history: what the step before returned; None where the solver starts.
        """
        # A deterministic sampler of a user's own has its own step.
        if self.eta is None:
            return self.step(latents, velocity, sigmas, step, eta=0.0).mean, None
        # A stochastic one takes Euler's: an SDE with s = 0 has a = sigma' and b = 0.
        no_noise = sigmas[step].new_zeros(())
        return self.sde_transition(latents, velocity, sigmas, step, no_noise).mean, None

    def sde_transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigmas: Tensor,
        step: int | Tensor,
        scale: Tensor,
        noise_share: Tensor | None = None,
    ) -> Transition:
        """Compute the transition of an SDE with the noise ``scale`` s of this step, scalar or [N].

        The drift is corrected for the noise that the step injects, so that x' has the marginal of
        sigma': a = sigma' - s^2 |dt| / (2 sigma), b = s sqrt|dt|.

        Args:
            noise_share: a, scalar or [N], of a sampler that corrects the drift in its own way.
        """
        sigma = sigmas[step]
        sigma_next = sigmas[step + 1]
        dt = sigma_next - sigma
        # a = sigma' - s^2 |dt| / (2 sigma), b = s sqrt|dt|. a^2 + b^2 is above sigma'^2 by about
        # s^2 dt^2 / sigma: late steps of a shifted schedule are long, and leave grain in the image.
        if noise_share is None:
            noise_share = sigma_next - scale**2 * dt.abs() / (2 * sigma)
        # x0_hat = x - sigma v,   x1_hat = x + (1 - sigma) v
        clean = latents - broadcast_rows(sigma, latents) * velocity
        noise = latents + broadcast_rows(1 - sigma, latents) * velocity
        # mu = (1 - sigma') x0_hat + a x1_hat
        mean = (
            broadcast_rows(1 - sigma_next, latents) * clean
            + broadcast_rows(noise_share, latents) * noise
        )
        return Transition(self, mean, scale * dt.abs().sqrt(), scale, dt)


def find_sampler(name: str) -> Sampler:
    """Return the sampler that a recipe names: one of ``ebbflow/flow/samplers`` by the name of its
    file, or a user's own by its path.

    Raises:
        RecipeError: nothing can be imported from the path.
    """
    # Not at the top of the file: a recipe imports it, by way of the samplers' own files.
    from ebbflow.recipe.plugins import import_object
    from ebbflow.recipe.samplers import SAMPLERS

    sampler = SAMPLERS[name] if name in SAMPLERS else import_object(name)
    return cast(Sampler, sampler)  # the recipe has rejected everything else


def compute_transition(
    sampler: str,
    latents: Tensor,
    velocity: Tensor,
    sigmas: Tensor,
    step: int | Tensor,
    eta: float | None = None,
) -> Transition:
    """Compute the transition of ``latents`` at denoising step ``step``.

    Everything is computed in float32 at least: bf16 latents alone move the first ratio off 1.

    Args:
        sampler: its name, or the path of a user's own; a single-step one.
        latents: x at sigma = sigmas[step], [N, ...].
        velocity: the predicted v there, [N, ...].
        sigmas: the descending schedule, [steps + 1], ending in 0.
        step: one step for all rows, or an integer tensor [N] with a step for each.
        eta: noise level; None takes the sampler's published default.
    """
    chosen = find_sampler(sampler)
    # Here and not in each sampler, so that a user's own is in float32, too.
    latents = at_least_float32(latents)
    velocity = at_least_float32(velocity)
    if eta is None:
        eta = chosen.eta or 0.0
    return chosen.step(latents, velocity, sigmas.to(latents), step, eta)


def sample_next_latents(transition: Transition, noise: Tensor) -> Tensor:
    """Compute x' = mu + b z for the given z, [N, ...]."""
    return transition.mean + broadcast_rows(transition.std, transition.mean) * noise


def compute_log_prob(transition: Transition, next_latents: Tensor, shape: Shape = ()) -> Tensor:
    """Compute the log-probability of x', [N]: the MEAN over the D elements of a sample, as in all
    published code; of a sample of K latents, [N, K], the mean over the elements of each.

    The mean (not the sum) is why clip ranges are 1e-3 ... 1e-6; multiply by D for the log-density.
    Where the sampler's log-prob is no density, it is -mean((x' - mu)^2), without 1/(2 b^2) and the
    normaliser.

    Args:
        shape: of a sample, ``Model.latent_shape``. Left out, a sample is one latent.

    Raises:
        ValueError: the step is deterministic (b = 0) and has no density; not on a GPU.
    """
    # Dividing by b = 0 would give NaN, which training would only notice in the loss. A GPU is not
    # asked, as each denoising step would wait for it; there the update names the row.
    if transition.std.device.type == "cpu" and not bool((transition.std > 0).all()):
        raise ValueError(
            f"a deterministic step of the {transition.sampler.name} sampler has no log-probability;"
            " score stochastic ones"
        )
    values = -((next_latents - transition.mean) ** 2)  # [N, ...]; CPS publishes their mean
    if transition.sampler.log_prob_is_density:
        # log N(x'; mu, b^2), elementwise: -(x' - mu)^2 / (2 b^2) - log b - log(2 pi) / 2.
        std = broadcast_rows(transition.std, transition.mean)
        values = values / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    if isinstance(shape, NamedLatents):
        return shape.average_parts(values)
    return values.flatten(1).mean(1)


def steps_to_zero(sigmas: Tensor, step: int) -> bool:
    """Return whether a step ends at sigma 0, as the last one of a whole schedule does."""
    # Not at the top of the file: reading a recipe imports it, and must not load torch.
    from ebbflow.flow.host_values import read_on_host

    return step + 2 == len(sigmas) and float(read_on_host(sigmas)[-1]) == 0


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
