"""Rollout correction: what the ratio of a trajectory is against, and how much each of its rows
counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.algorithms.correction import (
    compute_correction,
    compute_correction_metrics,
    compute_diagnostics,
)
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.trajectory import Trajectory
from ebbflow.models.base import Conditioning, predict
from ebbflow.recipe.stages import StageConfig, resolve_correction
from ebbflow.training.batches import CorrectedRollout, build_trajectory_batch
from ebbflow.training.distributed import Ranks
from ebbflow.training.policy import Policy


def apply_rollout_correction(
    policy: Policy,
    stage: StageConfig,
    trajectory: Trajectory,
    conditioning: Conditioning,
    keys: SampleKeys,
    sample_index: Tensor | None = None,
) -> tuple[CorrectedRollout, dict[str, float]]:
    """The rollout as the stage's correction sees it, and the diagnostics; without a correction, the
    rollout as it is.

    Every process of an FSDP group calls it with the same arguments and gets the same result, where
    the trajectory lies; each predicts for a share of the samples.

    Args:
        trajectory, keys: of N samples.
        conditioning: where the policy is.
        sample_index: integer [N], the row of ``conditioning`` of each sample; left out, it has a
            row for each of them.
    """
    as_it_is = CorrectedRollout.without_correction(trajectory)
    correction = resolve_correction(stage, policy.model.precision)
    if correction is None:
        return as_it_is, {}
    mine = _samples_of_rank(len(keys))
    rows = mine if sample_index is None else sample_index[mine]
    mean, log_prob = _predict_log_probs(
        policy,
        stage,
        as_it_is.select_samples(mine),
        conditioning.select_rows(rows),
        keys.select_samples(mine.numpy()),
    )
    log_prob = _gather_over_ranks(log_prob, trajectory.log_probs)
    delta = log_prob - trajectory.log_probs
    dims = trajectory.latents[0, 0].numel()
    weight, keep = compute_correction(delta, dims, correction)
    metrics = compute_diagnostics(delta, trajectory.steps, dims) | compute_correction_metrics(
        delta, dims, correction
    )
    shown = {name: value.item() for name, value in metrics.items()}
    if correction.mode == "bypass":
        return replace(as_it_is, weight=weight, keep=keep), shown
    return CorrectedRollout(
        trajectory, _gather_over_ranks(mean, trajectory.means), log_prob, weight, keep
    ), shown


def _samples_of_rank(samples: int) -> Tensor:
    """The samples that this process predicts for: as many on every process, so the last ones begin
    again with the first.
    """
    ranks = Ranks.current()
    count = math.ceil(samples / ranks.world)
    return torch.arange(ranks.rank * count, (ranks.rank + 1) * count) % samples


def _gather_over_ranks(mine: Tensor, like: Tensor) -> Tensor:
    """What all processes found for their shares of the samples, where ``like`` is and as many; one
    share at a time.
    """
    ranks = Ranks.current()
    found = []
    for rank in range(ranks.world):
        part = mine if rank == ranks.rank else torch.empty_like(mine)
        if ranks.world > 1:
            dist.broadcast(part, rank)
        found.append(part.to(like.device))
    return torch.cat(found)[: len(like)]


@torch.no_grad()
def _predict_log_probs(
    policy: Policy,
    stage: StageConfig,
    rollout: CorrectedRollout,
    conditioning: Conditioning,
    keys: SampleKeys,
) -> tuple[Tensor, Tensor]:
    """(mu [N, W, ...], log-prob [N, W]) of every row of N samples under the policy as it is now."""
    rollout = rollout.move_to(conditioning.device)
    no_advantage = rollout.old_log_prob.new_zeros(len(keys))
    batch = build_trajectory_batch(rollout, conditioning, no_advantage, keys, stage.sampler)
    found = []
    with policy.keep_gathered():
        for start in range(0, len(batch.inputs), stage.micro_batch):
            part = slice(start, start + stage.micro_batch)
            inputs = batch.inputs
            velocity = predict(policy.model, *inputs.model_arguments(part))
            rows = batch.build_rows(part, velocity, {})
            found.append((rows.transition.mean, rows.log_prob))
    means, log_probs = zip(*found, strict=True)
    return torch.cat(means).view_as(rollout.old_mean), torch.cat(log_probs).view_as(
        rollout.old_log_prob
    )
