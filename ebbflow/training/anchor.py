"""Rollout correction: what the ratio of a trajectory is against, and how much each of its terms counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ebbflow.algorithms.correction import correct, correction_metrics, diagnostics
from ebbflow.models.base import Conditioning, predict
from ebbflow.recipe.choices import Correction
from ebbflow.recipe.model import Precision
from ebbflow.recipe.stages import Stage
from ebbflow.rollouts.generate import SampleKeys, Trajectory
from ebbflow.training.batches import Corrected, TrajectoryBatch, trajectory_batch
from ebbflow.training.policy import Policy


def corrected(
    policy: Policy, stage: Stage, trajectory: Trajectory, conditioning: Conditioning, keys: SampleKeys
) -> tuple[Corrected, dict[str, float]]:
    """The rollout as the stage's correction sees it, and the diagnostics; without a correction, the rollout as it is."""
    as_it_is, correction = Corrected.nothing(trajectory), _correction(stage, policy.model.precision)
    if correction is None:
        return as_it_is, {}
    no_advantage = trajectory.log_probs.new_zeros(len(keys))
    batch = trajectory_batch(as_it_is, conditioning, no_advantage, keys, stage.sampler)
    mean, log_prob = _under(policy, batch, stage.micro_batch)
    log_prob = log_prob.view_as(trajectory.log_probs)
    delta = log_prob - trajectory.log_probs
    dims = trajectory.latents[0, 0].numel()
    weight, keep = correct(delta, dims, correction)
    metrics = diagnostics(delta, trajectory.steps, dims) | correction_metrics(delta, dims, correction)
    shown = {name: value.item() for name, value in metrics.items()}
    if correction.mode == "bypass":
        return replace(as_it_is, weight=weight, keep=keep), shown
    return Corrected(trajectory, mean.view_as(trajectory.means), log_prob, weight, keep), shown


def _correction(stage: Stage, precision: Precision) -> Correction | None:
    """The recipe's; without one, rollouts in another precision are watched and nothing else is done about them."""
    if stage.correction is None and (stage.rollout_precision or precision) != precision:
        return Correction(mode="bypass", weights="none")
    return stage.correction


@torch.no_grad()
def _under(policy: Policy, batch: TrajectoryBatch, micro_batch: int) -> tuple[Tensor, Tensor]:
    """(mu [M, ...], log-prob [M]) of every term under the policy as it is now."""
    found = []
    for start in range(0, len(batch.points), micro_batch):
        part, points = slice(start, start + micro_batch), batch.points
        velocity = predict(policy.model, *points.at(part))
        terms = batch.terms(part, velocity, {})
        found.append((terms.transition.mean, terms.log_prob))
    means, log_probs = zip(*found, strict=True)
    return torch.cat(means), torch.cat(log_probs)
