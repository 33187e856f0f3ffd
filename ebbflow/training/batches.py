"""From samples to the rows of a loss: where the network is evaluated, and what the algorithm then
gets to see.

Read ``RowBatch`` first: every kind of algorithm builds one, and the update knows nothing else of
it. N counts samples, W the trained denoising steps of each, M rows of a loss, G groups. ``...`` is
the shape of a latent, such as (C, H, W) of an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ebbflow.algorithms.base import AnyRows, CopyName, ForwardRows, TrajectoryRows, expand_like
from ebbflow.flow.host_values import derive, to_device
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import Transition, compute_log_prob, compute_transition
from ebbflow.flow.training_sigmas import sample_training_sigmas
from ebbflow.flow.windows import Trajectory
from ebbflow.models.base import Conditioning
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.seeding import Stream, iterate_generators
from ebbflow.training.distributed import Ranks

SampleGroups = list[np.ndarray]
"""Groups of samples, or of rows: the positions of the members of each group. The members of a group
are never split between processes or micro-batches, because its loss may compare them.

Example: three pairs of six samples: ``[array([0, 1]), array([2, 3]), array([4, 5])]``.

Samples that are trained on alone are groups of one: ``[array([0]), array([1]), ...]``.
"""


@dataclass(frozen=True)
class ForwardInputs:
    """Where the network is evaluated, M rows.

    Example: two samples with three noise levels each have six rows of latents and sigma, two rows
    of conditioning, and ``sample_index`` [0, 0, 0, 1, 1, 1].

    Attributes:
        latents: [M, ...].
        sigma: [M].
        conditioning: of the samples; large, so it is repeated for the rows of one micro-batch at a
            time.
        sample_index: integer [M], the row of ``conditioning`` that each row is generated from.
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
        """Return the arguments of the model's velocity at some rows."""
        return (
            self.latents[part],
            derive(lambda values: values[part], self.sigma),
            self.conditioning.select_rows(derive(lambda values: values[part], self.sample_index)),
        )

    def with_guidance(self, scale: float, scale_2: float | None = None) -> ForwardInputs:
        """Return the same inputs under classifier-free guidance.

        Args:
            scale_2: of the transformer for low noise, of families with two.

        Raises:
            ValueError: there are no negative prompts.
        """
        if self.negative is None:
            raise ValueError(
                f"guidance = {scale:g} needs negative prompts, and these samples were encoded"
                " without"
            )
        conditioning = replace(
            self.conditioning, negative=self.negative, guidance=scale, guidance_2=scale_2
        )
        return replace(self, conditioning=conditioning)

    def __len__(self) -> int:
        return len(self.sigma)


class RowBatch(Protocol):
    """The rows of one optimiser step: what ``PolicyUpdater.update_policy`` trains on.

    A batch is built before anything is predicted. The update then walks over it in passes: for each
    slice of rows it predicts the velocity at ``inputs`` (policy) and ``inputs_of(copy)`` (policy
    copies), and ``build_rows`` turns the predictions into the typed rows of the algorithm's loss.

    Example: four samples of a trajectory algorithm with three trained steps each, in two passes::

        len(batch.inputs)  # 12
        batch.group_index  # tensor([0, 1, ..., 11]): no row is compared with another
        part = slice(0, 6)  # the first pass: samples 0 and 1
        velocity = predict(model, *batch.inputs.model_arguments(part))  # [6, ...]
        rows = batch.build_rows(part, velocity, copies={})  # TrajectoryRows, [6]
        batch.describe_row(4)  # "prompt 17, sample 1, denoising step 2 (sigma 0.9000)"

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
        """Return where a copy of the policy is evaluated, [M]."""

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> AnyRows:
        """Build rows of the loss, given the velocities there under the policy and its copies."""

    def describe_row(self, row: int) -> str:
        """Return the sample and the step or noise level of a row, for people."""


@dataclass(frozen=True)
class TrajectoryBatch:
    """One row per (sample, trained step); rows of a sample are adjacent.

    Attributes:
        next_latents: [M, ...], what the rollout stepped to: the loss asks how probable they are.
        sigmas: the whole schedule of the rollout, [steps + 1].
        steps: integer [M], the denoising step of each row.
        old_log_prob: [M], under the policy that the ratio is against; of K latents [M, K].
        advantage: [M].
        old_mean: [M, ...], under the same policy, where the rollout recorded means.
        penalty_factor: [M], of the reference penalty, where the algorithm gates it.
    """

    latent_fields: ClassVar = ("inputs", "next_latents", "old_mean")
    inputs: ForwardInputs
    weight: Tensor
    group_index: Tensor
    next_latents: Tensor
    sigmas: Tensor
    steps: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    sampler: SamplerConfig
    keys: SampleKeys
    old_mean: Tensor | None = None
    penalty_factor: Tensor | None = None

    def inputs_of(self, copy: CopyName) -> ForwardInputs:
        return self.inputs

    def build_rows(
        self, part: slice, velocity: Tensor, copies: Mapping[CopyName, Tensor]
    ) -> TrajectoryRows:
        step = self.compute_transition(part, velocity)
        return TrajectoryRows(
            transition=step,
            log_prob=compute_log_prob(step, self.next_latents[part]),
            old_mean=None if self.old_mean is None else self.old_mean[part],
            old_log_prob=self.old_log_prob[part],
            copies={name: self.compute_transition(part, value) for name, value in copies.items()},
            advantage=self.advantage[part],
            penalty_factor=None if self.penalty_factor is None else self.penalty_factor[part],
        )

    def compute_transition(self, part: slice, velocity: Tensor) -> Transition:
        """Return the denoising step from each of some rows under a predicted velocity."""
        # The same function as in the rollout, so that the ratio is 1 until a weight moves. A second
        # implementation would differ in rounding, which the log-probs of many elements add up.
        return compute_transition(
            self.sampler.name,
            self.inputs.latents[part],
            velocity,
            self.sigmas,
            self.steps[part],
            self.sampler.eta,
        )

    def describe_row(self, row: int) -> str:
        sample = f"prompt {self.keys.prompt_ids[row]}, sample {self.keys.samples[row]}"
        return (
            f"{sample}, denoising step {int(self.steps[row])} (sigma"
            f" {float(self.inputs.sigma[row]):.4f})"
        )


def build_trajectory_batch(
    trajectory: Trajectory,
    conditioning: Conditioning,
    advantage: Tensor,
    keys: SampleKeys,
    sampler: SamplerConfig,
    rows: np.ndarray | None = None,
    sample_index: Tensor | None = None,
) -> TrajectoryBatch:
    """Build a row for each of some recorded steps of N samples, on the device of the conditioning.

    Args:
        conditioning: a row for each sample, or fewer with ``sample_index``.
        advantage: [N]; [N, W] where each of the steps has its own, [N, 1, K] where each of the
            latents has.
        keys: of the N samples.
        rows: integer [M], in the order that the batch has them: row n is trained step n % W of
            sample n // W. Default: every row that the correction kept.
        sample_index: integer [N], the row of ``conditioning`` of each sample.
    """
    device = conditioning.device
    if rows is None:
        keep = trajectory.keep
        if keep is None:
            keep = torch.ones(trajectory.log_probs.shape[:2], dtype=torch.bool)
        rows = np.flatnonzero(keep.cpu().numpy())
    sample_array, column_array = np.divmod(rows, len(trajectory.steps))
    sample = torch.from_numpy(sample_array)
    column = torch.from_numpy(column_array)
    # Rows are gathered where the rollout lies, usually in main memory, and only then moved: a
    # process trains on a share of them. [N, K, ...][sample, state] is [M, ...].
    state = trajectory.find_states()[column]
    steps = to_device(derive(lambda values: values[column], trajectory.steps), device)
    sigmas = to_device(trajectory.sigmas, device)
    old_log_prob = trajectory.log_probs[sample, column].to(device)
    row_advantage = advantage[sample]
    if advantage.ndim > 1:
        # [M] of its step; of each latent [M, K], the same at every step.
        row_advantage = advantage[sample, column if advantage.ndim == 2 else 0]
    weight = old_log_prob.new_ones(len(rows))
    if trajectory.weight is not None:
        weight = trajectory.weight[sample, column].to(device)
    return TrajectoryBatch(
        inputs=ForwardInputs(
            trajectory.states[sample, state].to(device),
            derive(lambda values, index: values[index], sigmas, steps),
            conditioning,
            to_device(sample if sample_index is None else sample_index[sample], device),
        ),
        weight=weight,
        group_index=torch.arange(len(rows), device=device),
        next_latents=trajectory.states[sample, state + 1].to(device),
        sigmas=sigmas,
        steps=steps,
        old_mean=None if trajectory.means is None else trajectory.means[sample, column].to(device),
        old_log_prob=old_log_prob,
        advantage=row_advantage.to(device),
        sampler=sampler,
        keys=keys.select_samples(sample_array),
    )


@dataclass(frozen=True)
class ForwardBatch:
    """One row per (sample, draw of sigma and noise).

    Attributes:
        clean: x0, [M, ...]; the network sees (1 - sigma) x0 + sigma eps.
        noise: eps, [M, ...].
        advantage: [M].
    """

    latent_fields: ClassVar = ("inputs", "clean", "noise")
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
    """Build ``config.noise_levels`` rows for each of N clean latents.

    The loss is on the network's own prediction, without classifier-free guidance: that is what
    noised samples are regressed on.

    Args:
        group_index: integer [N], ascending; the samples of a group share sigma, that of its first
            sample, and the noise likewise if ``config.shared_noise``.
        schedule: the sigmas of the stage's sampler, [steps + 1]; ``config.sigma`` may draw from
            them.
        visit: how often these samples were trained on before.
    """
    draws = config.noise_levels
    # ``first``: the first sample of each of G groups; ``group_of_sample``: integer [N], 0 to G - 1.
    _, first, group_of_sample = np.unique(group_index, return_index=True, return_inverse=True)
    # The samples whose own generators give noise. Where a group shares it, its first sample speaks
    # for all.
    owners = first if config.shared_noise else np.arange(len(keys))
    sigmas, noises = _sample_sigmas_and_noise(
        clean.shape[1:], keys, first, owners, config, schedule, visit
    )

    draw, sample = _order_draws(group_of_sample, draws)
    group = group_of_sample[sample]
    owner = group if config.shared_noise else sample
    sigma = to_device(sigmas[draw, group].to(clean.dtype), clean.device)
    noise = noises[draw, owner].to(clean)
    sample_index = to_device(torch.from_numpy(sample), clean.device)
    row_clean = clean[sample_index]
    share = expand_like(sigma, clean)
    return ForwardBatch(
        inputs=ForwardInputs(
            (1 - share) * row_clean + share * noise,
            sigma,
            conditioning.without_guidance(),
            sample_index,
            conditioning.negative,
        ),
        weight=torch.ones_like(sigma),
        # Samples of a group are compared within a draw, so each (group, draw) is a group of rows.
        group_index=torch.from_numpy(group * draws + draw).to(clean.device),
        clean=row_clean,
        noise=noise,
        advantage=advantage[sample_index],
        keys=keys.select_samples(sample),
    )


def _order_draws(group_of_sample: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (draw, sample) of every row, each sample in every draw, integer [draws * N]."""
    # All draws of a group are adjacent, so that every micro-batch sees the whole range of noise
    # levels; in the order of draws it would see a part of the range.
    num_samples = len(group_of_sample)
    draw = np.repeat(np.arange(draws), num_samples)
    sample = np.tile(np.arange(num_samples), draws)
    order = np.argsort(group_of_sample[sample], kind="stable")
    return draw[order], sample[order]


def _sample_sigmas_and_noise(
    shape: torch.Size,
    keys: SampleKeys,
    first: np.ndarray,
    owners: np.ndarray,
    config: ForwardConfig,
    schedule: Tensor,
    visit: int,
) -> tuple[Tensor, Tensor]:
    """Return the sigma of each group [draws, G], that of its ``first`` sample, and the noise of
    each of the ``owners`` [draws, owners, *shape].
    """
    draws = config.noise_levels
    numbers = [
        _sample_noise(shape, keys.select_samples(owners), visit * draws + draw)
        for draw in range(draws)
    ]
    uniforms = torch.stack([uniform for uniform, _ in numbers])  # (draws, owners)
    # Sigma is shared by a group also where noise is not: losses compare its samples at one level.
    sigmas = sample_training_sigmas(
        config.sigma,
        schedule,
        keys.select_samples(first),
        visit,
        uniforms[:, np.searchsorted(owners, first)],
    )
    return sigmas, torch.stack([noise for _, noise in numbers])


def _sample_noise(shape: torch.Size, keys: SampleKeys, number: int) -> tuple[Tensor, Tensor]:
    """Return (uniform in [0, 1) [N], noise [N, *shape]) of one draw of N samples."""
    uniform = np.empty(len(keys), dtype=np.float32)
    noise = np.empty((len(keys), *shape), dtype=np.float32)
    # Each sample has a generator of its own, so that neither batches nor processes change a draw.
    # The order of the two numbers is part of every recipe's bytes.
    for row, generator in enumerate(
        iterate_generators(keys.seed, keys.prompt_ids, keys.samples, number, Stream.TRAINING)
    ):
        uniform[row] = generator.random(dtype=np.float32)
        generator.standard_normal(dtype=np.float32, out=noise[row])
    return torch.from_numpy(uniform), torch.from_numpy(noise)


# How the groups of an update are split: over processes, over passes.


def shard_for_rank(groups: SampleGroups, ranks: Ranks) -> SampleGroups:
    """Return this process's groups of a batch.

    Where there are too few to go round, every process takes all of them: the mean over the rows of
    all processes is the same.
    """
    # No process may be left without rows: each forward and backward pass of FSDP2 is a collective
    # call, and the others would wait in it.
    if len(groups) < ranks.world:
        return groups
    share = np.array_split(np.arange(len(groups)), ranks.world)[ranks.rank]
    return [groups[index] for index in share]


def count_shared_micro_batches(groups: SampleGroups, world: int, draws: int, size: int) -> int:
    """Count the passes of about ``size`` rows that every process can take part in: their shares of
    the groups may differ by one.

    Args:
        groups: of the whole batch.
        draws: rows of each sample.
    """
    num_shares = world if len(groups) >= world else 1  # as ``shard_for_rank`` splits them
    largest = math.ceil(len(groups) / num_shares) * draws
    smallest = len(groups) // num_shares * draws
    groups_per_pass = max(1, size // max(map(len, groups)))
    # A pass needs a group of rows on every process, so the smallest share limits the passes.
    return min(math.ceil(largest / groups_per_pass), smallest)


def count_micro_batches(group_index: Tensor, size: int) -> int:
    """Count the passes of at most ``size`` rows that a batch takes; a group larger than that is a
    pass of its own.
    """
    counts = group_index.cpu().unique_consecutive(return_counts=True)[1]
    ends = counts.cumsum(0)[:-1].numpy()
    return count_shared_micro_batches(np.split(np.arange(len(group_index)), ends), 1, 1, size)


def split_into_passes(group_index: Tensor, passes: int) -> list[slice]:
    """Split the rows of a batch into parts of whole groups, about as many in each.

    Example: rows of the groups [0, 0, 1, 1, 2, 2] in two passes are [slice(0, 4), slice(4, 6)].
    """
    # The end of each group, in rows: [2, 4, 6] in the example.
    # On the CPU: on a GPU each of these operations would wait for it.
    ends = group_index.cpu().unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    assert passes <= len(ends), f"{passes} passes over {len(ends)} groups would leave some empty"
    slices = []
    start = 0
    for chunk in torch.arange(len(ends)).tensor_split(passes):
        end = ends[int(chunk[-1])]
        slices.append(slice(start, end))
        start = end
    return slices
