"""Rows of distribution matching: a few-step student's own steps, and its samples, noised again.

The steps are taken once for each update of the policy, without gradient and under the policy as it
is, whatever engine and version generated the samples that were scored: as many passes as the
sampler has steps. Fake score and policy draw from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, MatchingRows, RowMetrics, expand_like
from ebbflow.flow.host_values import expand_sigma, read_on_host, to_device
from ebbflow.flow.noise import SampleKeys, generate_initial_noise, generate_noise
from ebbflow.flow.renoising import compute_score_target, renoise_latents
from ebbflow.flow.sampler import compute_transition, sample_next_latents
from ebbflow.flow.training_sigmas import move_sigma, sample_training_sigmas
from ebbflow.models.base import Conditioning, Model, predict
from ebbflow.recipe.algorithms import MatchingConfig, SigmaConfig
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.seeding import Stream, iterate_generators
from ebbflow.training.batches import ForwardInputs, split_into_passes
from ebbflow.training.latent_losses import LatentShare, average_over_latents
from ebbflow.training.policy import Policy


@dataclass(frozen=True)
class StudentSteps:
    """The denoising steps of N samples, without gradient.

    Example: 16 samples of a student of four steps have ``latents`` and ``velocity`` of shape
    (16, 4, C, H, W) and five ``sigmas``, from 1 to 0.

    Attributes:
        latents: before each of K steps, [N, K, ...].
        velocity: predicted there, [N, K, ...].
        sigmas: [K + 1].
        conditioning: of the samples, without guidance; negative prompts where the teacher has
            guidance.
        keys: of the samples.
    """

    latents: Tensor
    velocity: Tensor
    sigmas: Tensor
    conditioning: Conditioning
    keys: SampleKeys


@dataclass(frozen=True)
class MatchingBatch:
    """One row per sample, before one of the student's steps.

    Attributes:
        inputs: there.
        noised: the student's sample from there, noised again.
        scale, target: the fake score minimises (scale v - target)^2 at ``noised``, [M] and [M,
            ...].
        guidance: of the teacher.
        steps: integer [M], the student's step of each row.
        rewarded_clean, base_clean: as of ``MatchingRows``, with a surrogate reward.
    """

    latent_fields: ClassVar = ("inputs", "noised", "target", "rewarded_clean", "base_clean")
    inputs: ForwardInputs
    noised: ForwardInputs
    scale: Tensor
    target: Tensor
    guidance: float
    steps: Tensor
    weight: Tensor
    group_index: Tensor
    advantage: Tensor
    keys: SampleKeys
    rewarded_clean: Tensor | None = None
    base_clean: Tensor | None = None

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        if copy == "teacher" and self.guidance > 1:
            return self.noised.with_guidance(self.guidance)
        return self.noised if copy in ("teacher", "fake") else self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> MatchingRows:
        return MatchingRows(
            latents=self.inputs.latents[part],
            sigma=self.inputs.sigma[part],
            velocity=velocity,
            noised=self.noised.latents[part],
            noised_sigma=self.noised.sigma[part],
            copies=copies,
            advantage=self.advantage[part],
            rewarded_clean=None if self.rewarded_clean is None else self.rewarded_clean[part],
            base_clean=None if self.base_clean is None else self.base_clean[part],
        )

    def describe_row(self, row: int) -> str:
        key = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return (
            f"{key}, denoising step {int(self.steps[row])}, noised to sigma"
            f" {float(self.noised.sigma[row]):.4f}"
        )


@dataclass(frozen=True)
class FakeScoreBatch:
    """The rows of a batch as the fake score is trained on them: mean (scale v - target)^2.

    Attributes:
        latents: of a sample of several latents; their errors are averaged by their shares.
    """

    rows: MatchingBatch
    latents: list[LatentShare]

    @property
    def inputs(self) -> ForwardInputs:
        return self.rows.noised

    @property
    def group_index(self) -> Tensor:
        return self.rows.group_index

    def compute_loss(self, part: slice, velocity: Tensor) -> tuple[Tensor, RowMetrics]:
        miss = expand_like(self.rows.scale[part], velocity) * velocity - self.rows.target[part]
        return average_over_latents(miss**2, self.latents), {}

    def describe_row(self, row: int) -> str:
        return self.rows.describe_row(row)


@torch.no_grad()
def sample_student_steps(
    policy: Policy,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    sigmas: Tensor,
    passes: int,
) -> StudentSteps:
    """Take the steps of N samples under the policy as it is, with the noise of their rollouts.

    Args:
        conditioning, keys: of the N samples.
        sigmas: the sampler's schedule, [K + 1].
        passes: forward passes that the samples are split into at each step, the same number on
            every process.
    """
    sigmas = to_device(sigmas, conditioning.device)
    unguided = conditioning.without_guidance()
    slices = split_into_passes(torch.arange(len(keys)), passes)
    with policy.keep_gathered():
        parts = [
            _sample_steps(
                policy.model, unguided.select_rows(part), keys.select_samples(part), sampler, sigmas
            )
            for part in slices
        ]
    latents = torch.cat([part_latents for part_latents, _ in parts])
    velocity = torch.cat([part_velocity for _, part_velocity in parts])
    return StudentSteps(latents, velocity, sigmas, conditioning, keys)


def _sample_steps(
    model: Model,
    conditioning: Conditioning,
    keys: SampleKeys,
    sampler: SamplerConfig,
    sigmas: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (latents before each step, velocity there), both [N, K, ...]."""
    device = conditioning.device
    all_latents = []
    velocities = []
    latents = generate_initial_noise(model.latent_shape, keys).to(device)
    for step in range(len(sigmas) - 1):
        velocity = predict(model, latents, expand_sigma(sigmas, step, len(keys)), conditioning)
        all_latents.append(latents)
        velocities.append(velocity)
        if step == len(sigmas) - 2:
            break  # where the last one ends is not asked for
        move = compute_transition(sampler.name, latents, velocity, sigmas, step, sampler.eta)
        latents = move.mean
        if sampler.is_stochastic:
            # Noise 0 of a sample is its initial noise, noise n + 1 that of step n, as in a rollout.
            noise = generate_noise(
                model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, step + 1
            )
            latents = sample_next_latents(move, noise.to(device))
    return torch.stack(all_latents, 1), torch.stack(velocities, 1)


@dataclass(frozen=True)
class RenoisedEnds:
    """Where one step of each of N samples ends, noised again.

    Attributes:
        inputs: before the step, [N, ...].
        noised: x' with fresh noise.
        scale, target: ``compute_score_target`` of it.
        steps: integer [N], the student's steps.
    """

    inputs: ForwardInputs
    noised: ForwardInputs
    scale: Tensor
    target: Tensor
    steps: Tensor


def build_matching_batch(
    steps: StudentSteps, advantage: Tensor, config: MatchingConfig, draw: int
) -> MatchingBatch:
    """Build a row for each of N samples, at a step and a noise level of its own.

    Args:
        advantage: [N].
        draw: a number for each batch that is made of the same steps: which step, noise level and
            noise.
    """
    step, uniform, noise = sample_training_noise(steps, steps.keys, draw)
    level = sample_noise_levels(config, config.sigma, steps, step, uniform, steps.keys, draw)
    ends = renoise_ends(steps, config, step, level, noise)
    return MatchingBatch(
        inputs=ends.inputs,
        noised=ends.noised,
        scale=ends.scale,
        target=ends.target,
        guidance=config.guidance,
        steps=ends.steps,
        weight=torch.ones(len(step), device=steps.latents.device),
        group_index=ends.inputs.sample_index,
        advantage=advantage,
        keys=steps.keys,
    )


def renoise_ends(
    steps: StudentSteps, config: MatchingConfig, step: Tensor, level: Tensor, noise: Tensor
) -> RenoisedEnds:
    """Noise the end of one step of each of N samples again.

    Args:
        step: integer [N].
        level: the sigma of the noised samples, [N].
        noise: [N, ...].
    """
    device = steps.latents.device
    sigmas = read_on_host(steps.sigmas)
    # dmd2 matches the student's clean predictions, tdm where its deterministic steps end.
    start = sigmas[step]
    end = sigmas[step + 1] if config.along_trajectory else torch.zeros(len(step))
    samples = torch.arange(len(step))
    rows, step, start, end, level, noise = (
        to_device(values, device) for values in (samples, step, start, end, level, noise)
    )
    latents = steps.latents[rows, step]  # (N, K, ...) -> (N, ...)
    velocity = steps.velocity[rows, step]
    # Where a deterministic step to ``end`` leads; to sigma 0 it is the clean prediction.
    reached = latents - expand_like(start - end, latents) * velocity
    inputs = ForwardInputs(
        latents, start, steps.conditioning.without_guidance(), rows, steps.conditioning.negative
    )
    scale, target = compute_score_target(reached, noise, end, level)
    noised = replace(inputs, latents=renoise_latents(reached, noise, end, level), sigma=level)
    return RenoisedEnds(inputs, noised, scale, target, step)


def sample_training_noise(
    steps: StudentSteps, keys: SampleKeys, draw: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (step, integer [N], uniform in [0, 1) [N], noise [N, ...]), from each sample's own
    generator, so that batches do not matter.

    Args:
        keys: of the N samples.
        weights: [K], the relative probabilities of the steps; None for equal ones.
    """
    count = len(steps.sigmas) - 1
    numbers = np.empty((len(keys), 2), dtype=np.float32)
    noise = np.empty((len(keys), *steps.latents.shape[2:]), dtype=np.float32)
    for row, generator in enumerate(
        iterate_generators(keys.seed, keys.prompt_ids, keys.samples, draw, Stream.TRAINING)
    ):
        numbers[row] = generator.random(2, dtype=np.float32)
        generator.standard_normal(dtype=np.float32, out=noise[row])
    choice = torch.from_numpy(numbers[:, 0].copy())
    # Without weights by a product and not by the search below, which may round to another step: the
    # draws of dmd2 and tdm are part of a recipe's bytes.
    if weights is None:
        step = (choice * count).long()
    else:
        step = torch.searchsorted(weights.cumsum(0) / weights.sum(), choice, right=True)
    # The largest float32 below 1 times ``count`` can round up to ``count``.
    step = step.clamp_max(count - 1)
    return step, torch.from_numpy(numbers[:, 1].copy()), torch.from_numpy(noise)


def sample_noise_levels(
    config: MatchingConfig,
    sigma: SigmaConfig,
    steps: StudentSteps,
    step: Tensor,
    uniform: Tensor,
    keys: SampleKeys,
    draw: int,
) -> Tensor:
    """Sample the sigma that each sample is noised to, [N]: along the trajectory between those of
    its step, or above its end.

    Args:
        sigma: the distribution.
        step: the student's step of each sample, integer [N].
        uniform: [N], and ``keys``: of the samples.
    """
    schedule = steps.sigmas.cpu()
    if not config.along_trajectory:
        return sample_training_sigmas(sigma, schedule, keys, draw, uniform[None])[0]
    # Each step has a band of its own, so the samples of each step are sampled together.
    levels = torch.empty(len(step))
    for number in step.unique().tolist():
        chosen = step == number  # bool (N,)
        chosen_keys = keys.select_samples(chosen.nonzero()[:, 0].numpy())
        low = float(schedule[number + 1])
        high = float(schedule[number])
        if config.level_gap is not None:
            # Just above the end x_t says nothing of the noise that was added, and the target, which
            # is divided by its share b, grows without a limit.
            low = move_sigma(low, config.level_gap, sigma.shift)
            high = 1.0
        band = _clip_sigma_band(sigma, low, high)
        levels[chosen] = sample_training_sigmas(
            band, schedule, chosen_keys, draw, uniform[None, chosen]
        )[0]
    return levels


def _clip_sigma_band(config: SigmaConfig, low: float, high: float) -> SigmaConfig:
    """Clip the band of the recipe to the noise levels of a step; all of them, from ``low`` to
    ``high``, where the band lies outside.
    """
    inside = (max(config.min, low), min(config.max, high))
    low, high = inside if inside[0] < inside[1] else (low, high)
    return config.model_copy(update={"min": low, "max": high})
