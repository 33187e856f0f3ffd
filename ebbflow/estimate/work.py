"""The work of each stage: samples, evaluations of the network, bytes stored. Keys that select
samples can only lower it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ebbflow.data.model_sizes import BYTES, ModelSizes, SampleSize
from ebbflow.flow.windows import (
    Plan,
    count_samples_per_prediction,
    count_states,
    count_tail_steps,
    plan_window,
)
from ebbflow.recipe.correction_rules import resolve_correction
from ebbflow.recipe.model import Precision
from ebbflow.stage import StageContext
from ebbflow.training.drift import choose_drift_stride

PNG_BYTES_PER_PIXEL = 3
"""Upper bound, which images of noise reach; photographs take about half."""
KEY_BYTES = 3 * 8


@dataclass(frozen=True)
class Work:
    """The work of a stage in a round, at most: keys that select samples can only lower it.

    Attributes:
        samples: number of samples that the stage generates.
        denoising: evaluations of the network to generate them, of one sample each.
        training: evaluations with a gradient, forward and backward.
        comparing: further evaluations without a gradient: of copies, of the rollout under the
            training policy, of the drift, of negative prompts.
        shards: bytes of the rollout shards of an offline stage.
        policy: bytes of the policy folder that the stage leaves.
    """

    samples: int
    denoising: int
    training: int
    comparing: int
    shards: int
    policy: int


def estimate_work(ctx: StageContext, sizes: ModelSizes, sample: SampleSize, trained: int) -> Work:
    """Return the work of a stage that trains ``trained`` parameters."""
    config = ctx.config
    passes = count_passes_per_term(ctx, sample)
    # A policy folder of full training is a whole network, with the parameters that were not
    # trained.
    untrained = (
        sizes.parameters - trained + sizes.buffers if ctx.recipe.policy.train == "full" else 0
    )
    samples, repeats, updates = _count_samples_and_updates(ctx)
    num_selected, group_size = count_selected_samples(ctx)
    rows = round(repeats * num_selected * _average_rows_per_sample(ctx))
    anchored = config.algorithm_kind.records_trajectory and resolve_correction(
        config, ctx.recipe.model.precision
    )
    comparing = rows * len(list_compared_copies(ctx)) + (
        samples * count_rows_per_sample(ctx) if anchored else 0
    )
    # A guided reference predicts twice. It is for final latents only, where ``passes`` is 1.
    comparing += 2 * rows * config.reference.needs_guidance
    if "rollout" in list_compared_copies(ctx):
        # In the first update on new samples, the rollout copy is the policy itself.
        # The rows of one update of each step, as every update has rows / updates of them.
        comparing -= rows * (config.steps if config.kind == "online" else 1) // updates
    if "reference" not in list_compared_copies(ctx):
        comparing += _count_drift_rows(
            updates, math.ceil(rows / updates), max(config.micro_batch, group_size)
        )
    cost = config.algorithm_kind.row_cost(config.hyper_parameters, config.sampler.steps)
    comparing += rows * cost.without_gradient
    passes_with_gradient = count_passes_with_gradient(ctx, sample)
    passes_without = passes - passes_with_gradient
    if config.kind == "online" and config.reuse_rollout_forward:
        passes_without = 0  # the rollout has evaluated the negative prompts
    return Work(
        samples=samples,
        denoising=round(average_denoising_steps(ctx) * samples) * sample.passes,
        training=rows * cost.with_gradient * passes_with_gradient,
        comparing=comparing * passes + rows * cost.with_gradient * passes_without,
        shards=(
            rollout_shard_bytes(sample, samples, config.latent_precision)
            if config.kind == "offline"
            else 0
        ),
        policy=4
        * (trained * (1 + len(ctx.following_copies) + bool(ctx.recipe.policy.ema)) + untrained),
    )


def _count_drift_rows(updates: int, rows: int, together: int) -> int:
    """Rows at which ``updates`` of ``rows`` each measure the drift, in a process that takes so many
    rows ``together``.
    """
    # Updates at which no drift is measured have None.
    strides = [choose_drift_stride(update, math.ceil(rows / together)) for update in range(updates)]
    return sum(math.ceil(rows / stride) for stride in strides if stride)


def count_passes_per_term(ctx: StageContext, sample: SampleSize) -> int:
    """Return the evaluations of the network for a term of the loss."""
    # Losses on final latents and of students are without guidance, others if the stage says so.
    unguided = ctx.config.algorithm_kind.is_unguided or not ctx.config.guidance_in_loss
    return 1 if unguided else sample.passes


def count_passes_with_gradient(ctx: StageContext, sample: SampleSize) -> int:
    """Return the evaluations for a term of the loss that its gradient goes through."""
    return count_passes_per_term(ctx, sample) if ctx.config.negative_gradient else 1


def _count_samples_and_updates(ctx: StageContext) -> tuple[int, int, int]:
    """(samples that a stage generates in a round, how often it trains on what it selects, its
    optimiser steps).

    A stage on pairs or data counts as none: they are not read.
    """
    config = ctx.config
    if config.kind == "online":
        samples = config.steps * config.prompts_per_step * config.group_size
        return samples, config.steps, config.steps * config.updates_per_step
    offline = ctx.offline_config
    samples = offline.prompts * offline.group_size if offline.takes_prompts else 0
    return (
        samples,
        offline.epochs if offline.takes_prompts else 0,
        offline.epochs * max(1, math.ceil(samples / offline.batch_size)),
    )


def count_selected_samples(ctx: StageContext) -> tuple[int, int]:
    """(samples that the algorithm selects of a step or a stage at most, the largest number that
    must stay together).
    """
    config = ctx.config
    prompts = config.prompts_per_step if config.kind == "online" else ctx.offline_config.prompts
    # Advantages that all differ, as rewards usually do: an algorithm that drops equal ones then
    # drops none, and the count is an upper bound.
    advantage = np.tile(np.linspace(1, -1, config.group_size), prompts)
    rank = np.tile(np.arange(config.group_size), prompts)
    extremes = config.advantages.keep_extremes or config.group_size
    keep = (rank < extremes) | (rank >= config.group_size - extremes)
    groups = ctx.algorithm.select(
        advantage, keep, np.repeat(np.arange(prompts), config.group_size), config.hyper_parameters
    )
    return sum(map(len, groups)), max(map(len, groups))


def count_rows_per_sample(ctx: StageContext) -> int:
    """Rows of the loss per sample: denoising steps of its trajectory, draws of noise, or
    branches."""
    kind = ctx.config.algorithm_kind
    if kind.records_trajectory:
        return len(_first_window_plan(ctx).trained)
    return kind.rows_per_entry(ctx.config.hyper_parameters)


def count_recorded_latents(ctx: StageContext) -> int:
    """Latents of a sample's trajectory: before and after its trained steps, and their means where
    the loss compares them."""
    plan = _first_window_plan(ctx)
    return count_states(plan.trained) + (len(plan.trained) if plan.with_means else 0)


def _first_window_plan(ctx: StageContext) -> Plan:
    plan = plan_window(ctx.config, ctx.stage_seed, 0, with_means=False)
    assert plan, "algorithms on trajectories have a window"
    return plan


def _average_rows_per_sample(ctx: StageContext) -> float:
    """As ``count_rows_per_sample``; the leaves of a tree share the rows of its nodes."""
    config = ctx.config
    if config.kind != "online" or config.tree is None:
        return count_rows_per_sample(ctx)
    leaves = dict(enumerate(config.noise_sharing))
    return sum(1 / leaves.get(step + 1, 1) for step in _first_window_plan(ctx).trained)


def average_denoising_steps(ctx: StageContext) -> float:
    """Evaluations of the network for a sample, on average over the steps of the stage's first
    round.
    """
    config = ctx.config
    if config.kind != "online" or config.window is None:
        return config.sampler.steps
    plans = [
        plan_window(config, ctx.stage_seed, step, with_means=False) for step in range(config.steps)
    ]
    return sum(_evaluations_per_sample(ctx, plan) for plan in plans if plan) / config.steps


def _evaluations_per_sample(ctx: StageContext, plan: Plan) -> float:
    """Return the evaluations for one sample with a window."""
    # A tail shortens the schedule, and samples that are still equal share their evaluations.
    steps = ctx.config.sampler.steps
    end = plan.stochastic[-1] + 1
    if plan.tail is not None:
        steps = end + count_tail_steps(steps - end, plan.tail)
    together = count_samples_per_prediction(
        ctx.config.noise_sharing, steps, plan.stochastic, plan.trained
    )
    return sum(1 / min(count, ctx.config.micro_batch) for count in together)


def list_compared_copies(ctx: StageContext) -> set[str]:
    """The copies whose predictions an update needs for every row, apart from a reference under
    guidance.
    """
    reference = ctx.config.reference
    anchor = {reference.copy_name} if reference.weight and not reference.needs_guidance else set()
    return set(ctx.algorithm.copies(ctx.config.hyper_parameters)) | anchor


def rollout_shard_bytes(sample: SampleSize, samples: int, precision: Precision = "float32") -> int:
    """Return the bytes of a rollout shard: for each sample its keys, its latents and its image."""
    return samples * (
        KEY_BYTES + BYTES[precision] * sample.num_elements + PNG_BYTES_PER_PIXEL * sample.pixels
    )
