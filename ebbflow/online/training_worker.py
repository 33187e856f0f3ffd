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
from ebbflow.algorithms.policy_gradient import compute_dead_share
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import StageRecord
from ebbflow.models import Conditioning
from ebbflow.models.base import device_of, generate_in_size, require_pixels
from ebbflow.models.encoding import Embeddings, embed_prompts
from ebbflow.online.first_update_alarm import find_first_update_alarms
from ebbflow.online.messages import RolloutRequest, TrainingBatch, TrainingReport
from ebbflow.online.tracing import TaskTimer
from ebbflow.recipe.algorithms import (
    DirectAlignConfig,
    ForwardConfig,
    GradientConfig,
    MatchingConfig,
)
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.rollouts.parity import compute_parity_bar, measure_parity
from ebbflow.rollouts.weights import Tensors, WeightsVersion, compute_checksum, split_into_buckets
from ebbflow.seeding import Stream, make_generator
from ebbflow.stage import StageContext
from ebbflow.training.batches import (
    CorrectedRollout,
    RowBatch,
    SampleGroups,
    build_forward_batch,
    build_trajectory_batch,
    count_shared_micro_batches,
    shard_for_rank,
    split_evenly,
)
from ebbflow.training.checkpoint import restore_updater, write_part
from ebbflow.training.direct_align import build_direct_align_batch
from ebbflow.training.distributed import Ranks
from ebbflow.training.matching import build_matching_batch, sample_student_steps
from ebbflow.training.policy_io import save_policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.reward_gradients import build_gradient_batch
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
        if scorer and isinstance(ctx.config.hyper_parameters, GradientConfig):
            scorer.require_gradients(ctx.config.algorithm_name)
            if scorer.trains_on_images:
                require_pixels(updater.policy.model, ctx.config.algorithm_name)
        self.timer = TaskTimer("training", rank)

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        """Every different prompt, once."""
        return embed_prompts(
            self.updater.policy.model, prompts, negatives=self.ctx.config.needs_guided_copy
        )

    def receive(self, *rollouts: Rollouts) -> None:
        """Nothing: what a worker is given comes to its machine, or is found to be gone, before a
        step that all ranks take.
        """

    def train(self, batch: TrainingBatch, *rollouts: Rollouts) -> TrainingReport:
        """The updates of a step, on the rollouts of all its requests."""
        model = self.updater.policy.model
        with (
            self.timer.time_task("training", batch.step, batch.profiled),
            generate_in_size(model, batch.size),
        ):
            metrics = train_on_batch(
                self.ctx, self.updater, batch, join_rollouts(rollouts), self.scorer
            )
            self.updater.finish_step()
        return TrainingReport(
            metrics, self.updater.updates, self.updater.alarms, self.timer.drain_spans()
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
            compute_checksum(whole),
            tuple(split_into_buckets(whole)),
            sum(value.nbytes for value in whole.values()),
        )

    def measure_parity(self, request: RolloutRequest, rollouts: Rollouts) -> dict[str, float]:
        """How far the samples of another engine are from the policy that rolls out
        (``ebbflow.rollouts.parity``).
        """
        policy = self.updater.policy
        device = device_of(policy.model)
        conditioning = request.conditioning.select_rows(torch.from_numpy(request.sample_index)).to(
            device
        )
        trajectory = rollouts.move_to(device).trajectory
        assert trajectory is not None, "the samples of the parity gate are recorded"
        bar = compute_parity_bar(self.ctx.config, trajectory.latents[0, 0].numel())
        micro_batch = self.ctx.config.micro_batch
        with policy.use_copy(self.updater.algorithm.generates):
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
        restore_updater(folder, self.updater)


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
        conditioning = conditioning.without_guidance()
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
    for groups in _split_groups_over_updates(ctx, batch):
        if (
            left := groups
            if trajectory is None
            else trajectory.list_kept_rows(np.concatenate(groups))
        ):
            shard = shard_for_rank(left, Ranks.current())
            before: dict[str, float] = {}
            if isinstance(ctx.config.hyper_parameters, GradientConfig):
                assert scorer is not None, (
                    "who opens a worker for such an algorithm gives it the rewards"
                )
                if isinstance(ctx.config.hyper_parameters, DirectAlignConfig):
                    rows = _build_direct_align_rows(
                        ctx,
                        batch,
                        updater,
                        scorer,
                        conditioning,
                        rollouts.latents,
                        np.concatenate(shard),
                    )
                else:
                    rows = _build_gradient_rows(
                        ctx,
                        batch,
                        updater,
                        scorer,
                        conditioning,
                        np.concatenate(shard),
                        _count_passes(ctx, left),
                    )
            elif isinstance(ctx.config.hyper_parameters, MatchingConfig):
                rows, before = _build_matching_rows(
                    ctx,
                    batch,
                    updater,
                    conditioning,
                    np.concatenate(shard),
                    _count_passes(ctx, left),
                )
            else:
                rows = _build_loss_rows(
                    ctx, batch, rollouts, conditioning, trajectory, shard, updater.sampler_sigmas
                )
            updates.append(before | _update_policy(ctx, updater, rows, left, batch.prompt_sets))
    if updates and "ratio/deviation" in updates[0]:
        metrics["ratio/first_deviation"] = updates[0]["ratio/deviation"]
        metrics["ratio/first_dead_share"] = compute_dead_share(updates[0])
    if updater.steps == 0 and trajectory is not None:
        updater.alarms += find_first_update_alarms(
            ctx.online_config, updater.policy.model.precision, metrics, rollouts.latents[0].numel()
        )
    return (
        metrics
        | _average_metrics(updates)
        | {"skipped_updates": ctx.online_config.updates_per_step - len(updates)}
    )


def _split_groups_over_updates(ctx: StageContext, batch: TrainingBatch) -> list[SampleGroups]:
    """The algorithm's sample groups, shuffled and split over the updates of a step; fewer updates
    when groups are too few.
    """
    prompt_ids = np.array(batch.keys.prompt_ids)
    groups = ctx.algorithm.select(
        batch.advantages, batch.keep, prompt_ids, ctx.config.hyper_parameters
    )
    order = make_generator(
        ctx.stage_seed, prompt_id=0, sample=batch.step, step=0, stream=Stream.ORDER
    ).permutation(len(groups))
    return [
        part
        for part in split_evenly([groups[i] for i in order], ctx.online_config.updates_per_step)
        if part
    ]


def _build_loss_rows(
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
    samples, steps = (numbers, None) if trajectory is None else trajectory.select_rows(numbers)
    keys = batch.keys.select_samples(samples)
    conditioning = conditioning.select_rows(torch.from_numpy(batch.sample_index[samples]))
    values = batch.advantages if batch.step_advantages is None else batch.step_advantages
    advantages = torch.from_numpy(values[samples]).to(device)
    if steps is not None:
        rows = build_trajectory_batch(
            steps.move_to(device), conditioning, advantages, keys, ctx.config.sampler
        )
        return (
            reuse_rollout_forward(rows, numbers, rollouts.velocities)
            if rollouts.velocities
            else rows
        )
    hyper = ctx.config.hyper_parameters
    assert isinstance(hyper, ForwardConfig)
    group_index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    clean = rollouts.latents[samples].to(device)
    return build_forward_batch(
        clean, conditioning, advantages, keys, group_index, hyper, schedule, visit=0
    )


def _build_gradient_rows(
    ctx: StageContext,
    batch: TrainingBatch,
    updater: PolicyUpdater,
    scorer: Scorer,
    conditioning: Conditioning,
    samples: np.ndarray,
    passes: int,
) -> RowBatch:
    """The rows of some samples whose rewards give a gradient."""
    hyper = ctx.config.hyper_parameters
    update = updater.progress.updates
    assert isinstance(hyper, GradientConfig)
    draw = make_generator(ctx.stage_seed, prompt_id=0, sample=update, step=0, stream=Stream.WINDOWS)
    return build_gradient_batch(
        model=updater.policy.model,
        conditioning=conditioning.select_rows(torch.from_numpy(batch.sample_index[samples])),
        advantage=torch.from_numpy(batch.advantages[samples]).to(conditioning.device),
        keys=batch.keys.select_samples(samples),
        prompts=[batch.prompts[sample] for sample in samples],
        sigmas=updater.sampler_sigmas,
        first_step=hyper.first_step(ctx.config.sampler.steps, draw),
        steps_with_gradient=hyper.steps_with_gradient,
        score=scorer.score_latents_with_gradient,
        passes=passes,
    )


def _build_direct_align_rows(
    ctx: StageContext,
    batch: TrainingBatch,
    updater: PolicyUpdater,
    scorer: Scorer,
    conditioning: Conditioning,
    latents: torch.Tensor,
    samples: np.ndarray,
) -> RowBatch:
    """The rows of some samples that are recovered with gradient."""
    hyper = ctx.config.hyper_parameters
    assert isinstance(hyper, DirectAlignConfig)
    return build_direct_align_batch(
        model=updater.policy.model,
        clean=latents[samples].to(conditioning.device),
        conditioning=conditioning.select_rows(torch.from_numpy(batch.sample_index[samples])),
        advantage=torch.from_numpy(batch.advantages[samples]).to(conditioning.device),
        keys=batch.keys.select_samples(samples),
        prompts=[batch.prompts[sample] for sample in samples],
        config=hyper,
        update=updater.progress.updates,
        score=scorer.score_latents_with_gradient,
    )


def _build_matching_rows(
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
    hyper = ctx.config.hyper_parameters
    assert isinstance(hyper, MatchingConfig)
    conditioning = conditioning.select_rows(torch.from_numpy(batch.sample_index[samples]))
    advantage = torch.from_numpy(batch.advantages[samples]).to(conditioning.device)
    keys = batch.keys.select_samples(samples)
    steps = sample_student_steps(
        updater.policy, conditioning, keys, ctx.config.sampler, updater.sampler_sigmas, passes
    )
    fake = [
        updater.update_fake_score(build_matching_batch(steps, advantage, hyper, draw), passes)
        for draw in range(hyper.fake_updates)
    ]
    return build_matching_batch(steps, advantage, hyper, hyper.fake_updates), _average_metrics(fake)


def _count_passes(ctx: StageContext, groups: SampleGroups) -> int:
    """Forward-backward passes of an update on some sample groups, on every rank."""
    hyper = ctx.config.hyper_parameters
    draws = 1
    if isinstance(hyper, ForwardConfig):
        draws = hyper.noise_levels
    elif isinstance(hyper, GradientConfig):
        draws = hyper.rows_per_sample
    return count_shared_micro_batches(groups, Ranks.current().world, draws, ctx.config.micro_batch)


def _update_policy(
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
        int(rows.group_index[-1]) + 1 if rows.inputs.predicted else _count_passes(ctx, groups)
    )  # the rollout's, each a group
    metrics = updater.update_policy(rows, passes, prompt_sets)
    if (
        len(groups) < world and "grad_variance" in metrics
    ):  # every rank had all of them, and each counted as another row
        metrics["grad_variance"] /= world
    return metrics


def _average_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
