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
from ebbflow.compute import log_device
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import StageRecord
from ebbflow.models.base import device_of, generate_in_size, require_pixels
from ebbflow.models.encoding import Embeddings, embed_prompts
from ebbflow.online.first_update_alarm import find_first_update_alarms
from ebbflow.online.messages import RolloutRequest, TrainingBatch, TrainingReport
from ebbflow.online.tracing import TaskTimer
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
    count_shared_micro_batches,
    shard_for_rank,
    split_evenly,
)
from ebbflow.training.checkpoint import restore_updater, write_part
from ebbflow.training.distributed import Ranks
from ebbflow.training.kinds.base import StepSamples, trainable_kind
from ebbflow.training.policy_io import save_policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.rollout_correction import apply_rollout_correction
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
        if scorer and ctx.config.algorithm_kind.needs_reward_gradient:
            scorer.require_gradients(ctx.config.algorithm_name)
            if scorer.trains_on_images:
                require_pixels(updater.policy.model, ctx.config.algorithm_name)
        self.timer = TaskTimer("training", rank)

    def describe_device(self) -> Mapping[str, str]:
        """What this rank computes on, as tags of the stage's MLflow run."""
        return log_device()

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
            # The model's size is set for the step: a stage may train on images of several sizes in
            # turn.
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
        # Some algorithms generate with a copy that follows the policy, such as ``old``.
        generates = copy or self.updater.algorithm.generates
        values = policy.parameters if generates == "current" else policy.copies[generates]
        whole: Tensors = {}
        # In the order of the parameters: a copy that was read from a file has another order.
        for name in policy.parameters:
            value = values[name]
            # One at a time: no rank of a sharded model has room for all of it on its device. Every
            # rank takes part, as ``full_tensor`` is a collective.
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self.rank == 0:
                # Copied: on the CPU the next update would change what is being sent.
                whole[name] = full.detach().to("cpu", copy=True)
        if self.rank > 0:
            return WeightsVersion(version)
        return WeightsVersion(
            version,
            # The digest travels with the weights, and every rollout worker compares what arrived.
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
        # A request has one row per prompt; the gate compares sample by sample.
        sample_index = torch.from_numpy(request.sample_index)
        conditioning = request.conditioning.select_rows(sample_index).to(device)
        trajectory = rollouts.move_to(device).trajectory
        assert trajectory is not None, "the samples of the parity gate are recorded"
        bar = compute_parity_bar(self.ctx.config, trajectory.latents[0, 0].numel())
        micro_batch = self.ctx.config.micro_batch
        # The engine has the weights of this copy (``publish``), which need not be those in
        # training.
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
            # All ranks call it: gathering a sharded policy is a collective, though one rank alone
            # writes.
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
    updater.start_rollout()
    step, metrics = _build_step_samples(ctx, updater, batch, rollouts, scorer)
    kind = trainable_kind(ctx.config.hyper_parameters.kind)
    updates: list[dict[str, float]] = []
    for selected in _split_groups_over_updates(ctx, batch):
        groups = kind.list_trained_groups(step, selected)
        # The correction may have rejected all samples; the skipped update is counted below.
        if not groups:
            continue
        # All ranks count passes over all groups, so that they run the same number of collectives.
        passes = count_shared_micro_batches(
            groups,
            Ranks.current().world,
            kind.rows_per_entry(ctx.config.hyper_parameters),
            ctx.config.micro_batch,
        )
        shard = shard_for_rank(groups, Ranks.current())
        rows, earlier_metrics = kind.build_batch(step, shard, passes)
        updates.append(
            earlier_metrics | _update_policy(updater, rows, groups, passes, batch.prompt_sets)
        )
    if updates:
        metrics |= kind.summarise_first_update(updates[0])
    # Only before the first update of a stage should the ratio be 1: no weight has moved.
    if updater.steps == 0 and step.trajectory is not None:
        updater.alarms += find_first_update_alarms(
            ctx.online_config, updater.policy.model.precision, metrics, rollouts.latents[0].numel()
        )
    return (
        metrics
        | _average_metrics(updates)
        | {"skipped_updates": ctx.online_config.updates_per_step - len(updates)}
    )


def _build_step_samples(
    ctx: StageContext,
    updater: PolicyUpdater,
    batch: TrainingBatch,
    rollouts: Rollouts,
    scorer: Scorer | None,
) -> tuple[StepSamples, dict[str, float]]:
    """The samples of a step as its updates train on them, with the rollout correction applied; and
    the metrics of the correction.
    """
    # One row per prompt; ``batch.sample_index`` has the row of each sample.
    conditioning = batch.conditioning.to(device_of(updater.policy.model))
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
            # In a tree, a step that several samples share is trained once: NaN marks the others.
            trained = torch.from_numpy(~np.isnan(batch.step_advantages))  # (N, W)
            trajectory = replace(
                trajectory, keep=trajectory.keep & trained.to(trajectory.keep.device)
            )
    step = StepSamples(
        updater=updater,
        keys=batch.keys,
        prompts=batch.prompts,
        conditioning=conditioning,
        sample_index=batch.sample_index,
        advantages=batch.advantages if batch.step_advantages is None else batch.step_advantages,
        latents=rollouts.latents,
        trajectory=trajectory,
        velocities=rollouts.velocities,
        scorer=scorer,
    )
    return step, metrics


def _split_groups_over_updates(ctx: StageContext, batch: TrainingBatch) -> list[SampleGroups]:
    """The algorithm's sample groups, shuffled and split over the updates of a step; fewer updates
    when groups are too few.
    """
    prompt_ids = np.array(batch.keys.prompt_ids)
    groups = ctx.algorithm.select(
        batch.advantages, batch.keep, prompt_ids, ctx.config.hyper_parameters
    )
    # Every rank draws the same order, from the seed and the step alone.
    generator = make_generator(
        ctx.stage_seed, prompt_id=0, sample=batch.step, step=0, stream=Stream.ORDER
    )
    shuffled = [groups[index] for index in generator.permutation(len(groups))]
    parts = split_evenly(shuffled, ctx.online_config.updates_per_step)
    return [part for part in parts if part]


def _update_policy(
    updater: PolicyUpdater,
    rows: RowBatch,
    groups: SampleGroups,
    passes: int,
    prompt_sets: Mapping[int, str],
) -> dict[str, float]:
    """Take one optimiser step of all ranks on some sample groups; ``rows`` are this rank's share of
    them.
    """
    world = Ranks.current().world
    if rows.inputs.predicted:
        # Predictions with the rollout's graphs come in the rollout's own passes, each of them a
        # group: their graphs cannot be cut otherwise.
        passes = int(rows.group_index[-1]) + 1
    metrics = updater.update_policy(rows, passes, prompt_sets)
    if len(groups) < world and "grad_variance" in metrics:
        # Every rank had all groups, and each counted as another row.
        metrics["grad_variance"] /= world
    return metrics


def _average_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
