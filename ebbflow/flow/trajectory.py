"""What a rollout records for training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """The trained steps of a rollout, all of them stochastic; everything in fp32.

    Example:
        4 samples of Stable Diffusion 3 at 512 x 512 in 10 steps, of which 2, 3 and 4 are trained:
        ``sigmas`` [11], ``steps`` = [2, 3, 4], ``states`` [4, 4, 16, 64, 64], those before step 2
        and after each step, ``log_probs`` [4, 3]. Of the steps [2, 4] there would be as many
        states, before and after each.

    Attributes:
        sigmas: the whole schedule as it was used (a plan's tail shortens its end), [steps + 1].
        steps: integer [W], the trained denoising steps, ascending.
        states: [N, K, ...], the latents before and after the trained steps, each once: W + 1 where
            the steps are neighbours (``count_states``).
        log_probs: [N, W], under the policy that generated it; of samples of K latents [N, W, K].
        means: [N, W, ...], mu of the step under the policy that generated it, where the plan
            records means.
        weight: [N, W], of each step in the loss, and ``keep``, bool [N, W], whether it is trained:
            set by the rollout correction (``ebbflow.training.rollout_correction``), which may also
            put ``means`` and ``log_probs`` under the policy that trains. None, as recorded: every
            step counts the same.
    """

    sigmas: Tensor
    steps: Tensor
    states: Tensor
    log_probs: Tensor
    means: Tensor | None = None
    weight: Tensor | None = None
    keep: Tensor | None = None

    @property
    def latents(self) -> Tensor:
        """The latents before each trained step, [N, W, ...]: a copy, where ``states`` are not."""
        return self.states[:, self.find_states()]

    @property
    def next_latents(self) -> Tensor:
        """The latents after each trained step, [N, W, ...]: a copy."""
        return self.states[:, self.find_states() + 1]

    def find_states(self) -> Tensor:
        """Find the state before each trained step, integer [W]; the next one is that after it."""
        # The state after a step is that before the next one, unless steps lie between.
        is_gap = self.steps.diff() != 1
        gaps = torch.cat([is_gap.new_zeros(1, dtype=torch.int64), is_gap.cumsum(0)])
        return torch.arange(len(self.steps), device=gaps.device) + gaps

    def list_columns(self) -> dict[str, Tensor]:
        """List the tensors by name: what is stored, sent and moved to another device."""
        return {name: values for name, values in vars(self).items() if values is not None}

    def select_samples(self, samples: Tensor) -> Trajectory:
        """Select some of the samples, integer [S]."""
        # ``sigmas`` and ``steps`` are those of all samples.
        return replace(
            self,
            states=self.states[samples],
            log_probs=self.log_probs[samples],
            means=None if self.means is None else self.means[samples],
        )
