"""From samples to the rows of a loss: where the network is evaluated, and what the algorithm then
gets to see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import AnyRows, CopyName, ForwardRows, TrajectoryRows, expand_like
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import Transition
from ebbflow.flow.training_sigmas import sample_training_sigmas
from ebbflow.flow.trajectory import Trajectory
from ebbflow.flow.transition import compute_log_prob, compute_transition
from ebbflow.models.base import Conditioning
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.seeding import Stream, iterate_generators
from ebbflow.training.distributed import Ranks

SampleGroups = list[np.ndarray]
"""Positions of samples or rows; those of a group stay together."""


@dataclass(frozen=True)
class ForwardInputs:
    """Where the network is evaluated, M rows.

    Attributes:
        latents: [M, ...].
        sigma: [M].
        conditioning: of the samples; large, so it is repeated for the rows of one micro-batch at a
            time.
        sample_index: integer [M], the sample of each row.
        negative: negative prompts of the samples, where ``conditioning`` leaves them out and there
            are any.
        checkpointed: whether the pass with gradient keeps no activations and is repeated in the
            backward pass.
        predicted: the policy's velocities that are known, [m, ...] with their graphs, by the first
            row of the pass; each is good for one backward pass, and whoever takes it removes it.
    """

    latents: Tensor
    sigma: Tensor
    conditioning: Conditioning
    sample_index: Tensor
    negative: Conditioning | None = None
    checkpointed: bool = False
    predicted: dict[int, Tensor] = field(default_factory=dict)

    def model_arguments(self, part: slice | Tensor) -> tuple[Tensor, Tensor, Conditioning]:
        """The arguments of the model's velocity at some rows."""
        return (
            self.latents[part],
            self.sigma[part],
            self.conditioning.select_rows(self.sample_index[part]),
        )

    def with_guidance(self, scale: float) -> ForwardInputs:
        """The same under classifier-free guidance.

        Raises:
            ValueError: there are no negative prompts.
        """
        if self.negative is None:
            raise ValueError(
                f"guidance = {scale:g} needs negative prompts, and these samples were encoded"
                " without"
            )
        return replace(
            self, conditioning=replace(self.conditioning, negative=self.negative, guidance=scale)
        )

    def __len__(self) -> int:
        return len(self.sigma)


class RowBatch(Protocol):
    """The rows of one optimiser step.

    Attributes:
        inputs: where the network is evaluated, [M].
        weight: [M], of each row's loss; 1 where rollouts need no correction.
        group_index: integer [M], ascending: the rows of a group stay in one micro-batch.
        keys: of the sample of each row, [M].
    """

    @property
    def inputs(self) -> ForwardInputs: ...

    @property
    def weight(self) -> Tensor: ...

    @property
    def group_index(self) -> Tensor: ...

    @property
    def keys(self) -> SampleKeys: ...

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        """Where a copy of the policy is evaluated, [M]."""

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> AnyRows:
        """Rows of the loss, given the velocities there under the policy and under its copies."""

    def describe_row(self, row: int) -> str:
        """Which sample and which step or noise level a row belongs to, for people."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """One row per (sample, trained step); rows of a sample are adjacent."""

    inputs: ForwardInputs
    weight: Tensor
    group_index: Tensor
    next_latents: Tensor
    sigmas: Tensor
    steps: Tensor
    old_mean: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    sampler: SamplerConfig
    keys: SampleKeys

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        return self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> TrajectoryRows:
        step = self.compute_transition(part, velocity)
        return TrajectoryRows(
            transition=step,
            log_prob=compute_log_prob(step, self.next_latents[part]),
            old_mean=self.old_mean[part],
            old_log_prob=self.old_log_prob[part],
            copies={name: self.compute_transition(part, value) for name, value in copies.items()},
            advantage=self.advantage[part],
        )

    def compute_transition(self, part: slice, velocity: Tensor) -> Transition:
        """The step from each of some rows under a predicted velocity."""
        latents = self.inputs.latents[part]
        steps = self.steps[part]
        return compute_transition(
            self.sampler.name, latents, velocity, self.sigmas, steps, self.sampler.eta
        )

    def describe_row(self, row: int) -> str:
        sample = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return (
            f"{sample}, denoising step {int(self.steps[row])} (sigma"
            f" {float(self.inputs.sigma[row]):.4f})"
        )


@dataclass(frozen=True)
class CorrectedRollout:
    """Trajectories of N samples at W steps, what their ratio is against, and how much each row
    counts.

    Attributes:
        old_mean: [N, W, ...].
        old_log_prob: [N, W].
        weight: [N, W].
        keep: bool [N, W].
    """

    trajectory: Trajectory
    old_mean: Tensor
    old_log_prob: Tensor
    weight: Tensor
    keep: Tensor

    @staticmethod
    def without_correction(trajectory: Trajectory) -> CorrectedRollout:
        """The rollout as it is."""
        log_probs = trajectory.log_probs
        ones = torch.ones_like(log_probs)
        return CorrectedRollout(trajectory, trajectory.means, log_probs, ones, ones.bool())

    def select_samples(self, samples: Tensor) -> CorrectedRollout:
        """Some of the samples."""
        parts = (self.old_mean, self.old_log_prob, self.weight, self.keep)
        return CorrectedRollout(
            self.trajectory.select_samples(samples), *(part[samples] for part in parts)
        )

    def list_kept_rows(self, samples: np.ndarray) -> SampleGroups:
        """The rows of some samples that are kept, each by itself: their numbers, row by row of [N,
        W].
        """
        numbers = torch.arange(self.keep.numel()).view_as(self.keep)[samples]
        return list(numbers[self.keep[samples]].numpy()[:, None])

    def select_rows(self, rows: np.ndarray) -> tuple[np.ndarray, CorrectedRollout]:
        """(the samples of some rows, those samples with nothing but these rows); the rows of a
        sample are adjacent.
        """
        sample, column = np.divmod(rows, self.keep.shape[1])
        samples, row = torch.from_numpy(sample).unique_consecutive(return_inverse=True)
        part = self.select_samples(samples)
        keep = torch.zeros_like(part.keep)
        keep[row, column] = True
        return samples.numpy(), replace(part, keep=keep)

    def move_to(self, device: torch.device) -> CorrectedRollout:
        moved = Trajectory(
            **{name: values.to(device) for name, values in vars(self.trajectory).items()}
        )
        parts = (self.old_mean, self.old_log_prob, self.weight, self.keep)
        return CorrectedRollout(moved, *(part.to(device) for part in parts))


def build_trajectory_batch(
    rollout: CorrectedRollout,
    conditioning: Conditioning,
    advantage: Tensor,
    keys: SampleKeys,
    sampler: SamplerConfig,
) -> TrajectoryBatch:
    """A row for every recorded step of N samples that the correction kept; all arguments cover the
    N samples.

    Args:
        advantage: [N], or [N, W] where each of the steps has its own.
    """
    trajectory = rollout.trajectory
    keep = rollout.keep.flatten()
    of_steps = advantage if advantage.ndim == 2 else advantage[:, None].expand(rollout.keep.shape)
    sample_index = torch.arange(len(keys), device=keep.device).repeat_interleave(
        len(trajectory.steps)
    )[keep]
    steps = trajectory.steps.repeat(len(keys))[keep]
    return TrajectoryBatch(
        inputs=ForwardInputs(
            trajectory.latents.flatten(0, 1)[keep],
            trajectory.sigmas[steps],
            conditioning,
            sample_index,
        ),
        weight=rollout.weight.flatten()[keep],
        group_index=torch.arange(len(sample_index), device=keep.device),
        next_latents=trajectory.next_latents.flatten(0, 1)[keep],
        sigmas=trajectory.sigmas,
        steps=steps,
        old_mean=rollout.old_mean.flatten(0, 1)[keep],
        old_log_prob=rollout.old_log_prob.flatten()[keep],
        advantage=of_steps.flatten()[keep],
        sampler=sampler,
        keys=keys.select_samples(sample_index.cpu().numpy()),
    )


@dataclass(frozen=True)
class ForwardBatch:
    """One row per (sample, draw of sigma and noise)."""

    inputs: ForwardInputs
    weight: Tensor
    group_index: Tensor
    clean: Tensor
    noise: Tensor
    advantage: Tensor
    keys: SampleKeys

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        return self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> ForwardRows:
        return ForwardRows(
            clean=self.clean[part],
            noise=self.noise[part],
            sigma=self.inputs.sigma[part],
            velocity=velocity,
            copies=copies,
            advantage=self.advantage[part],
            group_index=self.group_index[part],
        )

    def describe_row(self, row: int) -> str:
        sample = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return f"{sample}, noised to sigma {float(self.inputs.sigma[row]):.4f}"


def build_forward_batch(
    clean: Tensor,
    conditioning: Conditioning,
    advantage: Tensor,
    keys: SampleKeys,
    group_index: np.ndarray,
    config: ForwardConfig,
    schedule: Tensor,
    visit: int,
) -> ForwardBatch:
    """``config.noise_levels`` rows for each of N clean latents.

    Args:
        group_index: integer [N], ascending; the samples of a group share sigma, that of its first
            sample, and the noise likewise if ``config.shared_noise``.
        schedule: the sigmas of the stage's sampler, [steps + 1]; ``config.sigma`` may draw from
            them.
        visit: how often these samples were trained on before.

    The loss is on the network's own prediction, without classifier-free guidance: that is what
    noised samples are regressed on.
    """
    draws = config.noise_levels
    _, first, index = np.unique(group_index, return_index=True, return_inverse=True)
    drawing = first if config.shared_noise else np.arange(len(keys))  # the samples that draw noise
    drawn = [
        _sample_noise(clean.shape[1:], keys.select_samples(drawing), visit * draws + draw)
        for draw in range(draws)
    ]
    uniforms = torch.stack([uniform for uniform, _ in drawn])[:, np.searchsorted(drawing, first)]
    sigmas = sample_training_sigmas(
        config.sigma, schedule, keys.select_samples(first), visit, uniforms
    )
    # All draws of a group are adjacent, so that every micro-batch sees the whole range of noise
    # levels.
    draw = np.repeat(np.arange(draws), len(keys))
    sample_index = np.tile(np.arange(len(keys)), draws)
    order = np.argsort(index[sample_index], kind="stable")
    draw = draw[order]
    sample_index = sample_index[order]
    group = index[sample_index]
    sigma = sigmas[draw, group].to(clean)
    noise = torch.stack([noise for _, noise in drawn])[
        draw, group if config.shared_noise else sample_index
    ].to(clean)
    rows_of = torch.from_numpy(sample_index).to(clean.device)
    repeated = clean[rows_of]
    share = expand_like(sigma, clean)
    noised = (1 - share) * repeated + share * noise
    return ForwardBatch(
        inputs=ForwardInputs(
            noised, sigma, conditioning.without_guidance(), rows_of, conditioning.negative
        ),
        weight=torch.ones_like(sigma),
        group_index=torch.from_numpy(group * draws + draw).to(clean.device),
        clean=repeated,
        noise=noise,
        advantage=advantage[rows_of],
        keys=keys.select_samples(sample_index),
    )


def _sample_noise(shape: torch.Size, keys: SampleKeys, number: int) -> tuple[Tensor, Tensor]:
    """(uniform in [0, 1) [N], noise [N, *shape]) of one draw; from the sample's own generator, so
    batches do not matter.
    """
    uniform = np.empty(len(keys), dtype=np.float32)
    noise = np.empty((len(keys), *shape), dtype=np.float32)
    for row, generator in enumerate(
        iterate_generators(keys.seed, keys.prompt_ids, keys.samples, number, Stream.TRAINING)
    ):
        uniform[row] = generator.random(dtype=np.float32)
        generator.standard_normal(dtype=np.float32, out=noise[row])
    return torch.from_numpy(uniform), torch.from_numpy(noise)


def split_evenly(groups: SampleGroups, count: int) -> list[SampleGroups]:
    """The groups in ``count`` runs of about as many groups."""
    return [[groups[i] for i in part] for part in np.array_split(np.arange(len(groups)), count)]


def shard_for_rank(groups: SampleGroups, ranks: Ranks) -> SampleGroups:
    """This process's groups of a batch.

    Where there are too few to go round, every process takes all of them: the mean over the rows of
    all processes is the same.
    """
    return groups if len(groups) < ranks.world else split_evenly(groups, ranks.world)[ranks.rank]


def count_shared_micro_batches(groups: SampleGroups, world: int, draws: int, size: int) -> int:
    """Passes of about ``size`` rows that every process can take part in: their shares of the groups
    may differ by one.

    Args:
        groups: of the whole batch.
        draws: rows of each sample.
    """
    dealt = world if len(groups) >= world else 1
    largest = math.ceil(len(groups) / dealt) * draws
    smallest = len(groups) // dealt * draws
    return min(count_passes(largest, max(map(len, groups)), size), smallest)


def count_micro_batches(group_index: Tensor, size: int) -> int:
    """How many passes of at most ``size`` rows a batch takes; a group larger than that is a pass of
    its own.
    """
    counts = group_index.unique_consecutive(return_counts=True)[1]
    return count_passes(len(counts), int(counts.max()), size)


def count_passes(groups: int, group_size: int, size: int) -> int:
    """Passes of at most ``size`` rows over ``groups`` groups of at most ``group_size`` rows."""
    return math.ceil(groups / max(1, size // group_size))


def split_into_passes(group_index: Tensor, passes: int) -> list[slice]:
    """The rows of a batch in ``count_passes`` parts of whole groups, about as many in each."""
    ends = group_index.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    assert passes <= len(ends), f"{passes} passes over {len(ends)} groups would leave some empty"
    chunks = [chunk.tolist() for chunk in torch.arange(len(ends)).tensor_split(passes)]
    return [slice(ends[chunk[0] - 1] if chunk[0] else 0, ends[chunk[-1]]) for chunk in chunks]
