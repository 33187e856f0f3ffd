"""One optimiser step, for every algorithm: predict, lose, guard, step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbflow.algorithms.base import Algorithm, CopyName
from ebbflow.recipe.stages import Optimizer as OptimizerConfig
from ebbflow.training.batches import Points, TermBatch
from ebbflow.training.policy import Policy


class TrainingError(Exception):
    """Training that must not go on: names the step, the term and what to change."""


def make_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters."""
    return torch.optim.AdamW(policy.parameters.values(), lr=config.lr, weight_decay=config.weight_decay)


def optimise(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    hyper: Any,
    batch: TermBatch,
    config: OptimizerConfig,
    micro_batches: int,
    total_terms: int | None = None,
) -> dict[str, float]:
    """Take one optimiser step on the mean loss over all terms of all processes.

    Args:
        batch: this process's share of the terms.
        micro_batches: forward-backward passes, the same number on every process (they communicate in each).
        total_terms: terms over all processes; None means that this is the only one.

    Returns:
        The algorithm's metrics, averaged over the terms, and the gradient's.

    Raises:
        TrainingError: the loss or the gradient is not finite; the parameters are as they were.
    """
    total = total_terms or len(batch.points)
    # FSDP averages gradients over processes; this weight makes the result the mean over all terms however they were dealt out.
    weight = _world_size() / total
    parts = [slice(int(p[0]), int(p[-1]) + 1) for p in torch.arange(len(batch.points)).tensor_split(micro_batches)]
    # In the same order on every process: a swap communicates.
    copies = {name: _velocities(policy, name, batch.points, parts) for name in sorted(algorithm.copies(hyper))}
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    first_norm: Tensor | None = None
    for part in parts:
        velocity = _velocity(policy, batch.points, part)
        loss, metrics = algorithm.loss(batch.terms(part, velocity, {n: v[part] for n, v in copies.items()}), hyper)
        terms = part.stop - part.start
        (loss * terms * weight).backward()
        metrics |= {"loss": loss} | _drift(velocity, copies, part)
        for name, value in metrics.items():
            sums[name] = sums.get(name, torch.zeros((), device=value.device)) + value.detach() * terms
        if first_norm is None and micro_batches > 1:
            first_norm = _gradient_norm(policy)
            first_norm *= total / _over_processes(torch.tensor(float(terms), device=first_norm.device))
    means = _means(sums, total)
    norm = _gradient_norm(policy)
    _require_finite(means, norm)
    _clip(policy, norm, config.max_grad_norm)
    optimizer.step()
    return means | _gradient_metrics(norm, first_norm, len(parts), total) | {"lr": optimizer.param_groups[0]["lr"]}


def micro_batches(batch: TermBatch, size: int) -> int:
    """How many passes of at most ``size`` terms a batch takes."""
    return math.ceil(len(batch.points) / size)


def _velocity(policy: Policy, points: Points, part: slice) -> Tensor:
    return policy.model.velocity(points.latents[part], points.sigma[part], points.conditioning.rows(part))


def _velocities(policy: Policy, copy: CopyName, points: Points, parts: list[slice]) -> Tensor:
    """Predictions of a policy copy at every point: one swap of the parameters for all micro-batches."""
    with policy.using(copy):
        return torch.cat([_velocity(policy, points, part) for part in parts])


def _drift(velocity: Tensor, copies: Mapping[CopyName, Tensor], part: slice) -> dict[str, Tensor]:
    """mean((v - v_base)^2), where the base's prediction is at hand anyway."""
    if "reference" not in copies:
        return {}
    return {"velocity_drift": ((velocity.detach() - copies["reference"][part]) ** 2).mean()}


def _gradient_norm(policy: Policy) -> Tensor:
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _clip(policy: Policy, norm: Tensor, limit: float) -> None:
    torch.nn.utils.clip_grads_with_norm_(policy.parameters.values(), limit, norm)


def _gradient_metrics(norm: Tensor, first_norm: Tensor | None, micro_batches: int, total: int) -> dict[str, float]:
    """The norm before clipping, and how much single samples disagree.

    ``grad_variance`` estimates the trace of the per-term covariance of the gradient from the norms of a small and of the
    whole batch, (|g_small|^2 - |g|^2) / (1/B_small - 1/B) (An Empirical Model of Large-Batch Training, 1812.06162, A.1).
    One step's value is noisy and may be negative: look at its average.
    """
    metrics = {"grad_norm": norm.item()}
    if first_norm is not None:
        small = total / micro_batches
        metrics["grad_variance"] = (first_norm.item() ** 2 - norm.item() ** 2) / (1 / small - 1 / total)
    return metrics


def _means(sums: dict[str, Tensor], total: int) -> dict[str, float]:
    names = sorted(sums)
    values = _over_processes(torch.stack([sums[name].double() for name in names])) / total
    return dict(zip(names, values.tolist(), strict=True))


def _require_finite(means: dict[str, float], norm: Tensor) -> None:
    # Both are the same on every process, so all of them stop here together.
    if torch.isfinite(norm) and math.isfinite(means["loss"]):
        return
    wrong = [name for name, value in means.items() if not math.isfinite(value)] or ["the gradient alone"]
    raise TrainingError(
        f"not finite: {', '.join(wrong)} (gradient norm {norm.item()}); the step was not taken. "
        "Lower optimizer.lr or raise the algorithm's reference_weight, and look at the last metrics before this step"
    )


def _over_processes(value: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
