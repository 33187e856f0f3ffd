"""What a rollout records for training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """The trained steps of a rollout, all of them stochastic; everything in fp32.

    Example:
        4 samples of Stable Diffusion 3 at 512 x 512 in 10 steps, of which 2, 3 and 4 are trained:
        ``sigmas`` [11], ``steps`` = [2, 3, 4], ``latents``, ``next_latents`` and ``means`` [4, 3,
        16, 64, 64], ``log_probs`` [4, 3]. ``latents[:, 1]`` is equal to ``next_latents[:, 0]``, as
        steps 2 and 3 are neighbours.

    Attributes:
        sigmas: the whole schedule as it was used (a plan's tail shortens its end), [steps + 1].
        steps: integer [W], the trained denoising steps, ascending.
        latents: [N, W, ...], before each trained step.
        next_latents: [N, W, ...], after it.
        means: [N, W, ...], mu of the step under the policy that generated it.
        log_probs: [N, W], under the policy that generated it.
    """

    sigmas: Tensor
    steps: Tensor
    latents: Tensor
    next_latents: Tensor
    means: Tensor
    log_probs: Tensor

    def select_samples(self, samples: Tensor) -> Trajectory:
        """Select some of the samples, integer [S]."""
        # ``sigmas`` and ``steps`` are those of all samples.
        rows = {
            name: getattr(self, name)[samples]
            for name in ("latents", "next_latents", "means", "log_probs")
        }
        return replace(self, **rows)
