"""From samples to the terms of a loss: where the network is evaluated, and what the algorithm then gets to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, ForwardTerms, TrajectoryTerms, rows
from ebbflow.flow.noise import Stream, generator
from ebbflow.flow.transition import Transition, log_prob, transition
from ebbflow.models.base import Conditioning
from ebbflow.recipe.stages import Sampler
from ebbflow.rollouts.generate import SampleKeys, Trajectory


@dataclass(frozen=True)
class Points:
    """Where the network is evaluated, one row per term: latents [M, ...], sigma [M] and the encoded prompts."""

    latents: Tensor
    sigma: Tensor
    conditioning: Conditioning

    def __len__(self) -> int:
        return len(self.sigma)


class TermBatch(Protocol):
    """The terms of one optimiser step."""

    @property
    def points(self) -> Points: ...

    def terms(self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]) -> TrajectoryTerms | ForwardTerms:
        """The terms of some rows, given the velocities there under the policy and under its copies."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """One term per (sample, trained step) of a window; rows of a sample are adjacent."""

    points: Points
    next_latents: Tensor
    sigmas: Tensor
    steps: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    sampler: Sampler

    def terms(self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]) -> TrajectoryTerms:
        step = self._transition(part, velocity)
        return TrajectoryTerms(
            transition=step,
            log_prob=log_prob(step, self.next_latents[part]),
            old_log_prob=self.old_log_prob[part],
            copies={name: self._transition(part, value) for name, value in copies.items()},
            advantage=self.advantage[part],
        )

    def _transition(self, part: slice, velocity: Tensor) -> Transition:
        latents, steps = self.points.latents[part], self.steps[part]
        return transition(self.sampler.name, latents, velocity, self.sigmas, steps, self.sampler.eta)


def trajectory_batch(
    trajectory: Trajectory, conditioning: Conditioning, advantage: Tensor, sampler: Sampler, samples: Tensor
) -> TrajectoryBatch:
    """The terms of the given samples (integer [S]) of a recorded window; ``conditioning`` and ``advantage`` cover all N."""
    window = len(trajectory.steps)
    before, after = trajectory.latents[samples, :-1].flatten(0, 1), trajectory.latents[samples, 1:].flatten(0, 1)
    steps = trajectory.steps.repeat(len(samples))
    owner = samples.repeat_interleave(window)
    return TrajectoryBatch(
        points=Points(before, trajectory.sigmas[steps], conditioning.rows(owner)),
        next_latents=after,
        sigmas=trajectory.sigmas,
        steps=steps,
        old_log_prob=trajectory.log_probs[samples].flatten(),
        advantage=advantage[owner],
        sampler=sampler,
    )


@dataclass(frozen=True)
class ForwardBatch:
    """One term per (sample, draw of sigma and noise)."""

    points: Points
    clean: Tensor
    noise: Tensor
    advantage: Tensor

    def terms(self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]) -> ForwardTerms:
        return ForwardTerms(
            clean=self.clean[part],
            noise=self.noise[part],
            sigma=self.points.sigma[part],
            velocity=velocity,
            copies=copies,
            advantage=self.advantage[part],
        )


def forward_batch(
    clean: Tensor, conditioning: Conditioning, advantage: Tensor, keys: SampleKeys, draws: int, visit: int
) -> ForwardBatch:
    """``draws`` terms for each of N clean latents; ``visit`` counts how often these samples were trained on before.

    The draws of a sample are stratified: one sigma from each of ``draws`` equal parts of (0, 1).
    """
    drawn = [_draw(clean.shape[1:], keys, draws, visit * draws + draw, draw) for draw in range(draws)]
    sigma = torch.cat([sigma for sigma, _ in drawn]).to(clean)
    noise = torch.cat([noise for _, noise in drawn]).to(clean)
    owner = torch.arange(len(clean), device=clean.device).repeat(draws)
    repeated = clean[owner]
    share = rows(sigma, clean)
    noisy = (1 - share) * repeated + share * noise
    return ForwardBatch(Points(noisy, sigma, conditioning.rows(owner)), repeated, noise, advantage[owner])


def _draw(shape: torch.Size, keys: SampleKeys, draws: int, index: int, stratum: int) -> tuple[Tensor, Tensor]:
    """(sigma [N], noise [N, *shape]) of one draw; from the sample's own generator, so ranks and batches do not matter."""
    sigma = np.empty(len(keys), dtype=np.float32)
    noise = np.empty((len(keys), *shape), dtype=np.float32)
    for row, (prompt_id, sample) in enumerate(zip(keys.prompt_ids, keys.samples, strict=True)):
        stream = generator(keys.seed, prompt_id, sample, index, Stream.TRAINING)
        sigma[row] = (stratum + stream.random(dtype=np.float32)) / draws
        stream.standard_normal(dtype=np.float32, out=noise[row])
    return torch.from_numpy(sigma), torch.from_numpy(noise)
