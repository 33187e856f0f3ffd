"""A rank of the training group: the updates of a step, and the weights, checkpoints and policy
folders that come of them.

The sample groups of an update are split over the ranks. Several ranks learn what one would, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ebbflow.algorithms.advantages import AdvantageResult, PromptStatistics
from ebbflow.compute import log_device
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import StageRecord
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Conditioning
from ebbflow.models.base import (
    device_of,
    generate_in_size,
    require_pixels,
    require_split_guidance,
)
from ebbflow.models.encoding import Embeddings, embed_prompts
from ebbflow.online.first_update_alarm import find_first_update_alarms
from ebbflow.online.messages import RolloutRequest, TaskTimer, TrainingReport
from ebbflow.online.sample_exchange import SampleExchange
from ebbflow.recipe.choices import ENGINES_WITH_OWN_NOISE
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Rollouts, join_rollouts
from ebbflow.rollouts.parity import measure_parity
from ebbflow.rollouts.weights import Tensors, WeightsVersion, compute_checksum, split_into_buckets
from ebbflow.seeding import Stream, make_generator
from ebbflow.stage import StageContext
from ebbflow.training.batches import (
    SampleGroups,
    count_shared_micro_batches,
    shard_for_rank,
)
from ebbflow.training.checkpoint import restore_updater, write_part
from ebbflow.training.distributed import Ranks
from ebbflow.training.kinds.base import StepSamples, TrainableKind, trainable_kind
from ebbflow.training.policy_io import save_policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.rollout_correction import (
    apply_rollout_correction,
    list_predicted_samples,
)
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
            RecipeError: the algorithm's kind has no rows to train on.
            RewardError: a reward has no gradient, and the algorithm learns from it.
            ModelError: a reward looks at images, and the model's family does not decode with
                gradient; or it takes the gradient of guidance as a whole and the stage does not.
        """
        self.ctx = ctx
        self.updater = updater
        # Before the first rollout, so that a kind without rows costs none.
        self.kind = trainable_kind(ctx.config.hyper_parameters.kind)
        self.rows_per_entry = self.kind.rows_per_entry(ctx.config.hyper_parameters)
        self.pass_size = ctx.online_config.pass_size
        self.profiled_steps = ctx.online_config.list_profiled_steps("training")
        self.metadata = metadata
        self.rank = rank
        self.scorer = scorer
        if scorer and ctx.config.algorithm_kind.needs_reward_gradient:
            scorer.require_gradients(ctx.config.algorithm_name)
            if scorer.trains_on_images:
                require_pixels(updater.policy.model, ctx.config.algorithm_name)
        if not ctx.config.negative_gradient:
            require_split_guidance(updater.policy.model)
        self.encodes_negatives = ctx.config.needs_guided_copy
        self.timer = TaskTimer("training", rank)

    def describe_device(self) -> Mapping[str, str]:
        """What this rank computes on, as tags of the stage's MLflow run."""
        return log_device()

    def encode(self, prompts: Iterable[Prompt]) -> Embeddings:
        """Every different prompt, once."""
        return embed_prompts(self.updater.policy.model, prompts, negatives=self.encodes_negatives)

    def receive(self, *rollouts: Rollouts) -> None:
        """Nothing: what a worker is given comes to its machine, or is found to be gone, before a
        step that all ranks take.
        """

    def train(
        self, requests: Sequence[RolloutRequest], advantages: AdvantageResult, *rollouts: Rollouts
    ) -> TrainingReport:
        """Take the updates of a step.

        Args:
            requests: of the step, with N samples together.
            advantages: of these samples.
            rollouts: those of each request, in their order.
        """
        step = requests[0].step
        with (
            # The model's size is set for the step: a stage may train on images of several sizes in
            # turn.
            self.timer.time_task("training", step, step in self.profiled_steps) as spans,
            generate_in_size(self.updater.policy.model, requests[0].size),
        ):
            joined, exchange = self.join_step(rollouts)
            samples, metrics = self._build_step_samples(requests, advantages, joined, exchange)
            metrics |= self._train_on_samples(samples, advantages, step, exchange)
            metrics |= self.updater.finish_step()
        return TrainingReport(metrics, self.updater.updates, self.updater.alarms, spans)

    def join_step(self, rollouts: Sequence[Any]) -> tuple[Rollouts, SampleExchange | None]:
        """Join what ``train`` was given: all samples of the step, and how those come that lie on
        other ranks; None where all are here.
        """
        return join_rollouts(rollouts), None

    def _build_step_samples(
        self,
        requests: Sequence[RolloutRequest],
        advantages: AdvantageResult,
        rollouts: Rollouts,
        exchange: SampleExchange | None,
    ) -> tuple[StepSamples, dict[str, float]]:
        """Join the samples of a step's requests, with the rollout correction applied; return the
        metrics of the correction, too.

        Args:
            exchange: where samples lie on the ranks that generated them.
        """
        updater = self.updater
        # Losses with a copy of the policy from before the step compare with the policy as it is
        # now.
        updater.start_rollout()
        keys = SampleKeys.join_keys([request.keys for request in requests])
        # One row for each prompt. Rows of a request follow those of the requests before it, so the
        # row of each sample moves by as many.
        conditioning = Conditioning.concatenate([request.conditioning for request in requests])
        conditioning = conditioning.to(device_of(updater.policy.model))
        first_row = np.cumsum([0] + [len(request.conditioning) for request in requests])
        sample_index = np.concatenate(
            [r.sample_index + start for r, start in zip(requests, first_row[:-1], strict=True)]
        )
        if not self.ctx.config.guidance_in_loss:
            conditioning = conditioning.without_guidance()
        trajectory = rollouts.trajectory
        metrics: dict[str, float] = {}
        if trajectory is not None and updater.correction is not None:
            if exchange:
                exchange.bring(list_predicted_samples(len(keys), exchange.ranks.world))
            trajectory, metrics = apply_rollout_correction(
                updater, trajectory, conditioning, keys, torch.from_numpy(sample_index)
            )
        if trajectory is not None and advantages.of_steps is not None:
            # In a tree, a step that several samples share is trained once: NaN marks the others.
            keep = torch.from_numpy(~np.isnan(advantages.of_steps))  # (N, W)
            if trajectory.keep is not None:
                keep = keep.to(trajectory.keep.device) & trajectory.keep
            trajectory = replace(trajectory, keep=keep)
        samples = StepSamples(
            updater=updater,
            keys=keys,
            prompts=[prompt for request in requests for prompt in request.prompts],
            conditioning=conditioning,
            sample_index=sample_index,
            advantages=advantages.row_advantages,
            penalty_factor=advantages.penalty_factor,
            latents=rollouts.latents,
            trajectory=trajectory,
            velocities=rollouts.velocities,
            scorer=self.scorer,
        )
        return samples, metrics

    def _train_on_samples(
        self,
        samples: StepSamples,
        advantages: AdvantageResult,
        step: int,
        exchange: SampleExchange | None,
    ) -> dict[str, float]:
        """Take all updates of a step, one after another.

        Returns:
            metrics averaged over the updates, and ``skipped_updates``: those for which no sample
                was left to train on.
        """
        updater = self.updater
        kind = self.kind
        # Ranks that share the tokens of a row count as one.
        ranks = updater.policy.row_ranks
        prompt_sets = {prompt.prompt_id: prompt.source for prompt in samples.prompts}
        updates: list[dict[str, float]] = []
        for selected in self._split_groups_over_updates(samples, advantages, step):
            groups = kind.list_trained_groups(samples, selected)
            # The correction may have rejected all samples; the skipped update is counted below.
            if not groups:
                continue
            if exchange:
                groups = _bring_groups(exchange, kind, samples, groups)
            # All ranks count passes over all groups, so that they run the same number of
            # collectives.
            passes = count_shared_micro_batches(
                groups,
                ranks.world,
                self.rows_per_entry,
                self.pass_size,
            )
            rows, earlier_metrics = kind.build_batch(samples, shard_for_rank(groups, ranks), passes)
            if rows.inputs.predicted:
                # Predictions with the rollout's graphs come in the rollout's own passes, each of
                # them a group: their graphs cannot be cut otherwise.
                passes = int(rows.group_index[-1]) + 1
            # With fewer groups than ranks every rank has all of them.
            num_repeats = ranks.world if len(groups) < ranks.world else 1
            update_metrics = updater.update_policy(rows, passes, prompt_sets, num_repeats)
            updates.append(earlier_metrics | update_metrics)
        metrics = kind.summarise_first_update(updates[0]) if updates else {}
        # Only before the first update of a stage should the ratio be 1: no weight has moved.
        if updater.steps == 0 and samples.trajectory is not None:
            updater.alarms += find_first_update_alarms(
                self.ctx.online_config,
                updater.policy.model.precision,
                metrics,
                samples.latents[0].numel(),
            )
        num_skipped = self.ctx.online_config.updates_per_step - len(updates)
        return metrics | _average_metrics(updates) | {"skipped_updates": num_skipped}

    def _split_groups_over_updates(
        self, samples: StepSamples, advantages: AdvantageResult, step: int
    ) -> list[SampleGroups]:
        """The algorithm's sample groups, shuffled and split over the updates of a step; fewer
        updates when groups are too few.
        """
        updater = self.updater
        prompt_ids = np.array(samples.keys.prompt_ids)
        groups = updater.algorithm.select(
            advantages.values, advantages.keep, prompt_ids, updater.hyper
        )
        # Every rank draws the same order, from the seed and the step alone.
        generator = make_generator(
            self.ctx.stage_seed, prompt_id=0, sample=step, step=0, stream=Stream.ORDER
        )
        order = generator.permutation(len(groups))
        parts = np.array_split(order, self.ctx.online_config.updates_per_step)
        return [[groups[index] for index in part] for part in parts if len(part)]

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
        config = self.ctx.config
        return measure_parity(
            policy,
            trajectory,
            conditioning,
            request.keys,
            request.sampler,
            config.parity,
            # The engine has the weights of this copy (``publish``), which need not be those in
            # training.
            self.updater.algorithm.generates,
            config.rollout_precision,
            config.micro_batch,
            config.engine in ENGINES_WITH_OWN_NOISE,
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


def _bring_groups(
    exchange: SampleExchange, kind: TrainableKind, step: StepSamples, groups: SampleGroups
) -> SampleGroups:
    """Order the groups of an update by the ranks that generated them, so that ``shard_for_rank``
    leaves most of them there, and bring the others to their ranks.
    """
    first = kind.find_samples(step, np.array([group[0] for group in groups]))
    ordered = [groups[index] for index in np.argsort(exchange.owners[first], kind="stable")]
    world = exchange.ranks.world
    shares = [shard_for_rank(ordered, Ranks(rank, world)) for rank in range(world)]
    exchange.bring([kind.find_samples(step, np.concatenate(share)) for share in shares])
    return ordered


def _average_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}
