"""A rank of the training group: the updates of a step, and the weights, checkpoints and policy
folders that come of them.

The sample groups of an update are split over the ranks. Several ranks learn what one would, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.algorithms.policy_gradient import dead_share
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import StageRecord
from ebbflow.models import Conditioning
from ebbflow.models.base import device_of, in_size, require_pixels
from ebbflow.models.encoding import Embeddings, embed
from ebbflow.online.first_update_alarm import first_update_alarms
from ebbflow.online.messages import RolloutRequest, TrainingBatch, TrainingReport
from ebbflow.online.tracing import TaskTimer
from ebbflow.recipe.algorithms import (
    DirectAlignConfig,
    ForwardConfig,
    GradientConfig,
    MatchingConfig,
)
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Rollouts, join
from ebbflow.rollouts.parity import measure_parity, parity_bar
from ebbflow.rollouts.weights import Tensors, WeightsVersion, bucketize, checksum
from ebbflow.seeding import Stream, generator
from ebbflow.stage import StageContext
from ebbflow.training.batches import (
    CorrectedRollout,
    RowBatch,
    SampleGroups,
    forward_batch,
    num_micro_batches,
    shard_for_rank,
    split_evenly,
    trajectory_batch,
)
from ebbflow.training.checkpoint import restore, write_part
from ebbflow.training.direct_align import direct_align_batch
from ebbflow.training.distributed import Ranks
from ebbflow.training.matching import matching_batch, student_steps
from ebbflow.training.policy_io import save_policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.reward_gradients import gradient_batch
from ebbflow.training.rollout_correction import apply_rollout_correction
from ebbflow.training.rollout_forward import reuse_rollout_forward
from ebbflow.training.update import PolicyUpdater


class TrainingWorker:
    """Every method is called on all ranks of the group, with the same arguments."""

    def __init__(
        self,
        ctx: StageContext,
        updater: PolicyUpdater,
        metadata: PolicyMetadata | None = None,
        rank: int = 0,
        scorer: Scorer | None = None,
    ) -> None:
        """Args:
            metadata: of the policy folder that the stage starts from.
            scorer: the rewards, where the algorithm learns from their gradient.

        Raises:
            RewardError: a reward has no gradient, and the algorithm learns from it.
            ModelError: a reward looks at images, and the model's family does not decode with
                gradient.
        """
        self.ctx = ctx
        self.updater = updater
        self.metadata = metadata
        self.rank = rank
        self.scorer = scorer
        if scorer and isinstance(ctx.config.hyper, GradientConfig):
            scorer.require_gradients(ctx.config.algorithm_name)
            if scorer.looks_at_images:
                require_pixels(updater.policy.model, ctx.config.algorithm_name)
        self.timer = TaskTimer("training", rank)

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        """Every different prompt, once."""
        return embed(self.updater.policy.model, prompts, negatives=self.ctx.config.guides_a_copy)

    def receive(self, *rollouts: Rollouts) -> None:
        """Nothing: what a worker is given comes to its machine, or is found to be gone, before a
        step that all ranks take.
        """

    def train(self, batch: TrainingBatch, *rollouts: Rollouts) -> TrainingReport:
        """The updates of a step, on the rollouts of all its requests."""
        model = self.updater.policy.model
        with self.timer.task("training", batch.step, batch.profiled), in_size(model, batch.size):
            metrics = train_on_batch(self.ctx, self.updater, batch, join(rollouts), self.scorer)
            self.updater.finish_step()
        return TrainingReport(
            metrics, self.updater.updates, self.updater.alarms, self.timer.drain()
        )

    def publish(self, version: int, copy: str | None = None) -> WeightsVersion:
        """The weights that generate from now on, whole, on the CPU of rank 0. The other ranks only
        take part in gathering.

        Args:
            copy: of the policy; left out, the one that the algorithm rolls out.
        """
        policy = self.updater.policy
        generates = copy or self.updater.algorithm.generates
        values = policy.parameters if generates == "current" else policy.copies[generates]
        whole: Tensors = {}
        for (
            name
        ) in policy.parameters:  # in their order, as a copy that was read from a file has another
            value = values[
                name
            ]  # one at a time: no rank of a sharded model has room for all of it on its device
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                whole[name] = full.detach().to("cpu", copy=True)
        if self.rank > 0:
            return WeightsVersion(version)
        return WeightsVersion(
            version,
            checksum(whole),
            tuple(bucketize(whole)),
            sum(value.nbytes for value in whole.values()),
        )

    def measure_parity(self, request: RolloutRequest, rollouts: Rollouts) -> dict[str, float]:
        """How far the samples of another engine are from the policy that rolls out
        (``ebbflow.rollouts.parity``).
        """
        policy = self.updater.policy
        device = device_of(policy.model)
        conditioning = request.conditioning.rows(torch.from_numpy(request.sample_index)).to(device)
        trajectory = rollouts.to(device).trajectory
        assert trajectory is not None, "the samples of the parity gate are recorded"
        bar = parity_bar(self.ctx.config, trajectory.latents[0, 0].numel())
        micro_batch = self.ctx.config.micro_batch
        with policy.using(self.updater.algorithm.generates):
            return measure_parity(
                policy, trajectory, conditioning, request.keys, request.sampler, bar, micro_batch
            )

    def save(self, folder: Path, record: StageRecord, history: PromptStatistics) -> None:
        """Write the policy folder that the stage leaves behind."""
        assert self.metadata is not None
        save_policy(
            self.ctx,
            self.updater,
            self.metadata,
            record,
            folder,
            write=self.rank == 0,
            history=history,
        )

    def save_checkpoint(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint into a folder."""
        write_part(folder, self.updater)

    def load_checkpoint(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        restore(folder, self.updater)


def train_on_batch(
    ctx: StageContext,
    updater: PolicyUpdater,
    batch: TrainingBatch,
    rollouts: Rollouts,
    scorer: Scorer | None = None,
) -> dict[str, float]:
    """All updates of a step, one after another.

    Args:
        scorer: the rewards, where the algorithm learns from their gradient.

    Returns:
        metrics averaged over the updates, and ``skipped_updates``: those for which no sample was
            left to train on.
    """
    conditioning = batch.conditioning.to(device_of(updater.policy.model))
    updater.start_rollout()
    if not ctx.config.guidance_in_loss:
        conditioning = conditioning.unguided()
    trajectory: CorrectedRollout | None = None
    metrics: dict[str, float] = {}
    if rollouts.trajectory is not None:
        sample_index = torch.from_numpy(batch.sample_index)
        trajectory, metrics = apply_rollout_correction(
            updater.policy, ctx.config, rollouts.trajectory, conditioning, batch.keys, sample_index
        )
        if batch.step_advantages is not None:
            trained = torch.from_numpy(~np.isnan(batch.step_advantages))
            trajectory = replace(
                trajectory, keep=trajectory.keep & trained.to(trajectory.keep.device)
            )
    updates: list[dict[str, float]] = []
    for groups in _groups_of_updates(ctx, batch):
        if left := groups if trajectory is None else trajectory.kept(np.concatenate(groups)):
            shard = shard_for_rank(left, Ranks.current())
            before: dict[str, float] = {}
            if isinstance(ctx.config.hyper, GradientConfig):
                assert scorer is not None, (
                    "who opens a worker for such an algorithm gives it the rewards"
                )
                if isinstance(ctx.config.hyper, DirectAlignConfig):
                    rows = _direct_align_rows(
                        ctx,
                        batch,
                        updater,
                        scorer,
                        conditioning,
                        rollouts.latents,
                        np.concatenate(shard),
                    )
                else:
                    rows = _gradient_rows(
                        ctx,
                        batch,
                        updater,
                        scorer,
                        conditioning,
                        np.concatenate(shard),
                        _passes(ctx, left),
                    )
            elif isinstance(ctx.config.hyper, MatchingConfig):
                rows, before = _matching_rows(
                    ctx, batch, updater, conditioning, np.concatenate(shard), _passes(ctx, left)
                )
            else:
                rows = _loss_rows(
                    ctx, batch, rollouts, conditioning, trajectory, shard, updater.schedule
                )
            updates.append(before | _update(ctx, updater, rows, left, batch.prompt_sets))
    if updates and "ratio/deviation" in updates[0]:
        metrics["ratio/first_deviation"] = updates[0]["ratio/deviation"]
        metrics["ratio/first_dead_share"] = dead_share(updates[0])
    if updater.steps == 0 and trajectory is not None:
        updater.alarms += first_update_alarms(
            ctx.online, updater.policy.model.precision, metrics, rollouts.latents[0].numel()
        )
    return (
        metrics | _means(updates) | {"skipped_updates": ctx.online.updates_per_step - len(updates)}
    )


def _groups_of_updates(ctx: StageContext, batch: TrainingBatch) -> list[SampleGroups]:
    """The algorithm's sample groups, shuffled and split over the updates of a step; fewer updates
    when groups are too few.
    """
    prompt_ids = np.array(batch.keys.prompt_ids)
    groups = ctx.algorithm.select(batch.advantages, batch.keep, prompt_ids, ctx.config.hyper)
    order = generator(
        ctx.seed, prompt_id=0, sample=batch.step, step=0, stream=Stream.ORDER
    ).permutation(len(groups))
    return [
        part
        for part in split_evenly([groups[i] for i in order], ctx.online.updates_per_step)
        if part
    ]


def _loss_rows(
    ctx: StageContext,
    batch: TrainingBatch,
    rollouts: Rollouts,
    conditioning: Conditioning,
    trajectory: CorrectedRollout | None,
    groups: SampleGroups,
    schedule: torch.Tensor,
) -> RowBatch:
    """The rows of the loss for some sample groups: samples, or single denoising steps of
    trajectories.
    """
    numbers = np.concatenate(groups)
    device = conditioning.device
    if rollouts.velocities:
        numbers.sort()  # in the order of the rollout, whose passes are those of the update
    samples, steps = (numbers, None) if trajectory is None else trajectory.only(numbers)
    keys = batch.keys.take(samples)
    conditioning = conditioning.rows(torch.from_numpy(batch.sample_index[samples]))
    values = batch.advantages if batch.step_advantages is None else batch.step_advantages
    advantages = torch.from_numpy(values[samples]).to(device)
    if steps is not None:
        rows = trajectory_batch(
            steps.to(device), conditioning, advantages, keys, ctx.config.sampler
        )
        return (
            reuse_rollout_forward(rows, numbers, rollouts.velocities)
            if rollouts.velocities
            else rows
        )
    hyper = ctx.config.hyper
    assert isinstance(hyper, ForwardConfig)
    group_index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    clean = rollouts.latents[samples].to(device)
    return forward_batch(
        clean, conditioning, advantages, keys, group_index, hyper, schedule, visit=0
    )


def _gradient_rows(
    ctx: StageContext,
    batch: TrainingBatch,
    updater: PolicyUpdater,
    scorer: Scorer,
    conditioning: Conditioning,
    samples: np.ndarray,
    passes: int,
) -> RowBatch:
    """The rows of some samples whose rewards give a gradient."""
    hyper = ctx.config.hyper
    update = updater.progress.updates
    assert isinstance(hyper, GradientConfig)
    draw = generator(ctx.seed, prompt_id=0, sample=update, step=0, stream=Stream.WINDOWS)
    return gradient_batch(
        model=updater.policy.model,
        conditioning=conditioning.rows(torch.from_numpy(batch.sample_index[samples])),
        advantage=torch.from_numpy(batch.advantages[samples]).to(conditioning.device),
        keys=batch.keys.take(samples),
        prompts=[batch.prompts[sample] for sample in samples],
        sigmas=updater.schedule,
        first_step=hyper.first_step(ctx.config.sampler.steps, draw),
        steps_with_gradient=hyper.steps_with_gradient,
        score=scorer.of_latents_with_gradient,
        passes=passes,
    )


def _direct_align_rows(
    ctx: StageContext,
    batch: TrainingBatch,
    updater: PolicyUpdater,
    scorer: Scorer,
    conditioning: Conditioning,
    latents: torch.Tensor,
    samples: np.ndarray,
) -> RowBatch:
    """The rows of some samples that are recovered with gradient."""
    hyper = ctx.config.hyper
    assert isinstance(hyper, DirectAlignConfig)
    return direct_align_batch(
        model=updater.policy.model,
        clean=latents[samples].to(conditioning.device),
        conditioning=conditioning.rows(torch.from_numpy(batch.sample_index[samples])),
        advantage=torch.from_numpy(batch.advantages[samples]).to(conditioning.device),
        keys=batch.keys.take(samples),
        prompts=[batch.prompts[sample] for sample in samples],
        config=hyper,
        update=updater.progress.updates,
        score=scorer.of_latents_with_gradient,
    )


def _matching_rows(
    ctx: StageContext,
    batch: TrainingBatch,
    updater: PolicyUpdater,
    conditioning: Conditioning,
    samples: np.ndarray,
    passes: int,
) -> tuple[RowBatch, dict[str, float]]:
    """(the rows of some samples, metrics of the fake score), once the fake score has followed the
    policy.
    """
    hyper = ctx.config.hyper
    assert isinstance(hyper, MatchingConfig)
    conditioning = conditioning.rows(torch.from_numpy(batch.sample_index[samples]))
    advantage = torch.from_numpy(batch.advantages[samples]).to(conditioning.device)
    keys = batch.keys.take(samples)
    steps = student_steps(
        updater.policy, conditioning, keys, ctx.config.sampler, updater.schedule, passes
    )
    fake = [
        updater.update_fake(matching_batch(steps, advantage, hyper, draw), passes)
        for draw in range(hyper.fake_updates)
    ]
    return matching_batch(steps, advantage, hyper, hyper.fake_updates), _means(fake)


def _passes(ctx: StageContext, groups: SampleGroups) -> int:
    """Forward-backward passes of an update on some sample groups, on every rank."""
    hyper = ctx.config.hyper
    draws = 1
    if isinstance(hyper, ForwardConfig):
        draws = hyper.noise_levels
    elif isinstance(hyper, GradientConfig):
        draws = hyper.rows_per_sample
    return num_micro_batches(groups, Ranks.current().world, draws, ctx.config.micro_batch)


def _update(
    ctx: StageContext,
    updater: PolicyUpdater,
    rows: RowBatch,
    groups: SampleGroups,
    prompt_sets: Mapping[int, str],
) -> dict[str, float]:
    """One optimiser step of all ranks on some sample groups; ``rows`` are this rank's share of
    them.
    """
    world = Ranks.current().world
    passes = (
        int(rows.group_index[-1]) + 1 if rows.inputs.predicted else _passes(ctx, groups)
    )  # the rollout's, each a group
    metrics = updater.update(rows, passes, prompt_sets)
    if (
        len(groups) < world and "grad_variance" in metrics
    ):  # every rank had all of them, and each counted as another row
        metrics["grad_variance"] /= world
    return metrics


def _means(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
