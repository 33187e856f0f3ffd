"""Rollout correction: what the ratio of a trajectory is against, and how much each of its rows
counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.algorithms.correction import correct, correction_metrics, diagnostics
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.trajectory import Trajectory
from ebbflow.models.base import Conditioning, predict
from ebbflow.recipe.stages import StageConfig, correction_of
from ebbflow.training.batches import CorrectedRollout, trajectory_batch
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
    as_it_is = CorrectedRollout.nothing(trajectory)
    correction = correction_of(stage, policy.model.precision)
    if correction is None:
        return as_it_is, {}
    mine = _share(len(keys))
    rows = mine if sample_index is None else sample_index[mine]
    mean, log_prob = _under(
        policy, stage, as_it_is.take(mine), conditioning.rows(rows), keys.take(mine.numpy())
    )
    log_prob = _of_all(log_prob, trajectory.log_probs)
    delta = log_prob - trajectory.log_probs
    dims = trajectory.latents[0, 0].numel()
    weight, keep = correct(delta, dims, correction)
    metrics = diagnostics(delta, trajectory.steps, dims) | correction_metrics(
        delta, dims, correction
    )
    shown = {name: value.item() for name, value in metrics.items()}
    if correction.mode == "bypass":
        return replace(as_it_is, weight=weight, keep=keep), shown
    return CorrectedRollout(
        trajectory, _of_all(mean, trajectory.means), log_prob, weight, keep
    ), shown


def _share(samples: int) -> Tensor:
    """The samples that this process predicts for: as many on every process, so the last ones begin
    again with the first.
    """
    ranks = Ranks.current()
    count = math.ceil(samples / ranks.world)
    return torch.arange(ranks.rank * count, (ranks.rank + 1) * count) % samples


def _of_all(mine: Tensor, like: Tensor) -> Tensor:
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
def _under(
    policy: Policy,
    stage: StageConfig,
    rollout: CorrectedRollout,
    conditioning: Conditioning,
    keys: SampleKeys,
) -> tuple[Tensor, Tensor]:
    """(mu [N, W, ...], log-prob [N, W]) of every row of N samples under the policy as it is now."""
    rollout = rollout.to(conditioning.device)
    no_advantage = rollout.old_log_prob.new_zeros(len(keys))
    batch = trajectory_batch(rollout, conditioning, no_advantage, keys, stage.sampler)
    found = []
    with policy.kept_gathered():
        for start in range(0, len(batch.inputs), stage.micro_batch):
            part = slice(start, start + stage.micro_batch)
            inputs = batch.inputs
            velocity = predict(policy.model, *inputs.at(part))
            rows = batch.rows(part, velocity, {})
            found.append((rows.transition.mean, rows.log_prob))
    means, log_probs = zip(*found, strict=True)
    return torch.cat(means).view_as(rollout.old_mean), torch.cat(log_probs).view_as(
        rollout.old_log_prob
    )
