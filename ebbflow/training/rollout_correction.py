"""Rollout correction: what the ratio of a trajectory is against, and how much each of its rows
counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.algorithms.correction import (
    compute_correction,
    compute_correction_metrics,
    compute_diagnostics,
)
from ebbflow.flow.latents import join_averages
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import compute_log_prob
from ebbflow.flow.windows import Trajectory
from ebbflow.models.base import Conditioning, predict
from ebbflow.recipe.passes import split_into_equal_passes
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.training.batches import TrajectoryBatch, build_trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater


def apply_rollout_correction(
    updater: PolicyUpdater,
    trajectory: Trajectory,
    conditioning: Conditioning,
    keys: SampleKeys,
    sample_index: Tensor | None = None,
) -> tuple[Trajectory, dict[str, float]]:
    """Return the trajectory as the stage's correction sees it, with the weight of each row and
    which rows stay, and the diagnostics.

    Every process of an FSDP group calls it with the same arguments and gets the same result, where
    the trajectory lies; each predicts for a share of the samples.

    Args:
        trajectory, keys: of N samples.
        conditioning: where the policy is.
        sample_index: integer [N], the row of ``conditioning`` of each sample; left out, it has a
            row for each of them.
    """
    stage = updater.stage
    assert isinstance(stage, OnlineStageConfig)
    correction = updater.correction
    assert correction is not None, "the caller asks whether the stage has one"
    ranks = updater.policy.row_ranks
    num_samples = len(keys)
    num_steps = len(trajectory.steps)
    my_samples = list_predicted_samples(num_samples, ranks.world)[ranks.rank]
    my_rows = (my_samples[:, None] * num_steps + np.arange(num_steps)).flatten()
    batch = build_trajectory_batch(
        trajectory,
        conditioning,
        torch.zeros(num_samples),  # no loss is taken of these rows
        keys,
        stage.sampler,
        my_rows,
        sample_index,
    )
    mean, log_prob = _predict_log_probs(updater.policy, batch, stage.pass_size)
    log_prob = _gather_over_ranks(updater.policy, log_prob, trajectory.log_probs)

    # Of the MEAN over the D elements of a sample; the correction knows what that means for ratios.
    # One weight for all latents of a sample: they were generated together.
    delta = join_averages(
        log_prob - trajectory.log_probs, updater.policy.model.latent_shape
    )  # (N, W)
    dims = trajectory.states[0, 0].numel()
    weight, keep = compute_correction(delta, dims, correction)
    diagnostics = compute_diagnostics(delta, trajectory.steps, dims) | compute_correction_metrics(
        delta, dims, correction
    )
    metrics = {name: value.item() for name, value in diagnostics.items()}
    if correction.mode == "bypass":
        # The ratio stays against the log-probs of the rollout; only weights and rejection apply.
        return replace(trajectory, weight=weight, keep=keep), metrics
    means = trajectory.means
    if means is not None:
        means = _gather_over_ranks(updater.policy, mean, means)
    return replace(trajectory, log_probs=log_prob, weight=weight, keep=keep, means=means), metrics


def list_predicted_samples(num_samples: int, world: int) -> list[np.ndarray]:
    """List the samples that each process predicts for the correction, by their positions."""
    # As many on each process, because under FSDP2 every pass is a collective call: the last shares
    # begin again with the first samples.
    share = math.ceil(num_samples / world)
    return [np.arange(rank * share, (rank + 1) * share) % num_samples for rank in range(world)]


@torch.no_grad()
def _predict_log_probs(
    policy: Policy, batch: TrajectoryBatch, pass_size: int
) -> tuple[Tensor, Tensor]:
    """Return (mu [M, ...], log-prob [M] or of K latents [M, K]) of every row under the policy as it
    is now.
    """
    means = []
    log_probs = []
    with policy.keep_gathered():
        for part in split_into_equal_passes(len(batch.inputs), pass_size):
            velocity = predict(policy.model, *batch.inputs.model_arguments(part))
            step = batch.compute_transition(part, velocity)
            means.append(step.mean)
            log_probs.append(
                compute_log_prob(step, batch.next_latents[part], policy.model.latent_shape)
            )
    return torch.cat(means), torch.cat(log_probs)


def _gather_over_ranks(policy: Policy, mine: Tensor, like: Tensor) -> Tensor:
    """Return what all processes predicted for their rows, [N W, ...], in the shape [N, W, ...] of
    ``like`` and where it is.
    """
    ranks = policy.row_ranks
    parts = []
    # One share at a time: a gather into a list would hold all of them on the device.
    for rank in range(ranks.world):
        part = mine if rank == ranks.rank else torch.empty_like(mine)
        if ranks.world > 1:
            # Ranks that share tokens have the same predictions; the first of them sends.
            dist.broadcast(part, rank * policy.context_parallel)
        parts.append(part.to(like.device))
    return torch.cat(parts)[: like.shape[:2].numel()].view_as(like)
