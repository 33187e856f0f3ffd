"""The surrogate reward of a few-step student: a denoiser that learns from the rewards of whole
groups, and what the student learns from it (TDM-R1, ``ebbflow.algorithms.built_in.tdm_r1``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import RowMetrics, SurrogateRows, expand_like
from ebbflow.flow.noise import SampleKeys
from ebbflow.recipe.algorithms import SurrogateConfig
from ebbflow.training.batches import ForwardInputs, split_into_passes
from ebbflow.training.latent_losses import LatentShare, join_latent_losses, select_latent
from ebbflow.training.matching import (
    MatchingBatch,
    StudentSteps,
    renoise_ends,
    sample_noise_levels,
    sample_training_noise,
)
from ebbflow.training.passes import predict_velocities_of_copy
from ebbflow.training.policy import Policy

SurrogateLoss = Callable[[SurrogateRows], tuple[Tensor, RowMetrics]]


@dataclass(frozen=True)
class SurrogateBatch:
    """The rows of the surrogate's loss: N samples at the ends of steps that their groups share.

    Attributes:
        inputs: the ends, noised again, without guidance.
        target, teacher, old, step_share, advantage, group_index: as of ``SurrogateRows``.
        advantage_clip: ``advantages.clip``.
        loss: of the rows.
        latents: of samples of several latents; empty where a sample has one.
        keys: of the samples.
    """

    latent_fields: ClassVar = ("inputs", "target", "teacher", "old")
    inputs: ForwardInputs
    target: Tensor
    teacher: Tensor
    old: Tensor
    step_share: Tensor
    advantage: Tensor
    group_index: Tensor
    advantage_clip: float
    loss: SurrogateLoss
    latents: list[LatentShare]
    keys: SampleKeys

    def compute_loss(self, part: slice, velocity: Tensor) -> tuple[Tensor, RowMetrics]:
        if not self.latents:
            return self.loss(self._build_rows(part, velocity))
        losses = []
        metrics = []
        for latent in self.latents:
            rows = select_latent(self, latent)._build_rows(part, velocity[:, latent.elements])
            loss, latent_metrics = self.loss(rows)
            losses.append(loss)
            metrics.append(latent_metrics)
        return join_latent_losses(self.latents, losses, metrics)

    def _build_rows(self, part: slice, velocity: Tensor) -> SurrogateRows:
        return SurrogateRows(
            velocity=velocity,
            target=self.target[part],
            teacher=self.teacher[part],
            old=self.old[part],
            step_share=self.step_share[part],
            advantage=self.advantage[part],
            group_index=self.group_index[part],
            advantage_clip=self.advantage_clip,
        )

    def describe_row(self, row: int) -> str:
        key = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return f"{key}, noised to sigma {float(self.inputs.sigma[row]):.4f}"


def build_surrogate_batch(
    policy: Policy,
    steps: StudentSteps,
    group_index: np.ndarray,
    advantage: Tensor,
    config: SurrogateConfig,
    draw: int,
    passes: int,
    loss: SurrogateLoss,
    advantage_clip: float,
    latents: list[LatentShare],
) -> SurrogateBatch:
    """Build a row for each of N samples of G groups, which share step, noise level and noise.

    Step k of K, from one, has the probability 2k / (K (K + 1)): what late steps end at is near the
    sample that was scored.

    Args:
        group_index: integer [N], ascending.
        advantage: [N], of several latents [N, K].
        draw: as of ``build_matching_batch``.
        passes: forward passes of each copy, the same number on every process.
    """
    count = len(steps.sigmas) - 1
    # Inside a group only the samples may differ: with another step, level or noise the errors of
    # its rows would differ whatever the surrogate knows of the reward.
    _, first, group = np.unique(group_index, return_index=True, return_inverse=True)
    owners = steps.keys.select_samples(first)  # the first sample speaks for its group
    weights = torch.arange(1.0, count + 1)
    step, uniform, noise = sample_training_noise(steps, owners, draw, weights)
    level = sample_noise_levels(config, config.surrogate_sigma, steps, step, uniform, owners, draw)
    # (G,) of the groups -> (N,) of their samples.
    ends = renoise_ends(steps, config, step[group], level[group], noise[group])
    index = torch.from_numpy(group).to(ends.steps.device)
    slices = split_into_passes(index, passes)
    # What the loss compares with stands still, so it is predicted once, before the copy is trained.
    with torch.no_grad():
        teacher, old = (
            predict_velocities_of_copy(policy, name, ends.noised, slices)
            for name in ("teacher", "surrogate_old")
        )
    return SurrogateBatch(
        inputs=ends.noised,
        # (scale v - target)^2 is the error of v times scale^2; the published error has no weight.
        target=ends.target / expand_like(ends.scale, ends.target),
        teacher=teacher,
        old=old,
        step_share=(ends.steps + 1) / count,
        advantage=advantage,
        group_index=index,
        advantage_clip=advantage_clip,
        loss=loss,
        latents=latents,
        keys=steps.keys,
    )


@torch.no_grad()
def add_surrogate_reward(
    policy: Policy,
    batch: MatchingBatch,
    steps: StudentSteps,
    config: SurrogateConfig,
    draw: int,
    passes: int,
) -> MatchingBatch:
    """Add to each row what the surrogate and the teacher make of its sample, noised to a level of
    ``surrogate_sigma``.

    Args:
        draw: as of ``build_matching_batch``.
        passes: forward passes of each copy, the same number on every process.
    """
    # The step is that of the row, so that both terms of its gradient are of one x'; level and noise
    # are others, as the reward is asked at high noise alone.
    _, uniform, noise = sample_training_noise(steps, steps.keys, draw)
    step = batch.steps.cpu()
    level = sample_noise_levels(
        config, config.surrogate_sigma, steps, step, uniform, steps.keys, draw
    )
    noised = renoise_ends(steps, config, step, level, noise).noised
    # Guidance makes the reward's direction sharper. The teacher has none: it is subtracted.
    guided = noised
    if config.surrogate_guidance > 1:
        guided = noised.with_guidance(config.surrogate_guidance)
    slices = split_into_passes(batch.group_index, passes)
    surrogate = predict_velocities_of_copy(policy, "surrogate", guided, slices)
    teacher = predict_velocities_of_copy(policy, "teacher", noised, slices)
    sigma = expand_like(noised.sigma, noised.latents)
    return replace(
        batch,
        rewarded_clean=noised.latents - sigma * surrogate,
        base_clean=noised.latents - sigma * teacher,
    )
