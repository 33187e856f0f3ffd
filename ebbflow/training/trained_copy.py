"""A policy copy that is trained beside the policy: the fake score of distribution matching, and the
surrogate reward of a few-step student.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName, RowMetrics
from ebbflow.models.base import predict
from ebbflow.recipe.algorithms import EmaScheduleConfig
from ebbflow.recipe.kinds import TrainedCopyConfig
from ebbflow.training.batches import ForwardInputs, split_into_passes
from ebbflow.training.distributed import sum_over_processes
from ebbflow.training.optimizer import AnyOptimizer, build_optimizer
from ebbflow.training.passes import TrainingError, compute_gradient_norm
from ebbflow.training.policy import Policy


class CopyBatch(Protocol):
    """The rows that a copy is trained on."""

    @property
    def inputs(self) -> ForwardInputs:
        """Where the copy predicts, for M rows."""

    @property
    def group_index(self) -> Tensor:
        """Integer [M], ascending; rows of a group stay in one pass."""

    def compute_loss(self, part: slice, velocity: Tensor) -> tuple[Tensor, RowMetrics]:
        """Compute the loss and the metrics of m rows, [m], of the copy's velocity [m, ...]."""

    def describe_row(self, row: int) -> str:
        """Say which row it is, for an error."""


class TrainedCopy:
    """The policy copy ``name`` and its optimiser.

    It steps on the policy's own parameters while they are the copy's, so it trains adapters and
    sharded weights as well. Its moving average, where it has one, is the copy ``NAME_old``.
    """

    def __init__(self, policy: Policy, name: CopyName, config: TrainedCopyConfig) -> None:
        self.policy = policy
        self.name = name
        self.average: EmaScheduleConfig | None = config.average
        self.max_grad_norm: float = config.optimizer.max_grad_norm
        self.optimizer: AnyOptimizer = build_optimizer(policy, config.optimizer)

    def take_step(self, batch: CopyBatch, passes: int, count: int) -> dict[str, float]:
        """Take one optimiser step on the mean loss over the rows of all processes.

        Args:
            batch: this process's share of the rows.
            passes: forward-backward passes, the same number on every process.
            count: optimiser steps of the policy's algorithm with this one, from one.

        Raises:
            TrainingError: the loss or the gradient is not finite; the step was not taken.
        """
        policy = self.policy
        slices = split_into_passes(batch.group_index, passes)
        device = batch.inputs.latents.device
        # Processes may have different numbers of rows, and a row counts the same in each.
        total = int(sum_over_processes(torch.tensor(len(batch.inputs), device=device)))
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        metric_sums: dict[str, Tensor] = {}
        row_losses = []
        # The parameters are the copy's inside the block. Gradients and the optimiser's state belong
        # to the parameter objects, so they are kept apart: the block clears gradients before and
        # after, and this optimiser has a state of its own.
        with policy.train_copy(self.name):
            for part in slices:
                velocity = predict(policy.model, *batch.inputs.model_arguments(part))  # [m, ...]
                losses, metrics = batch.compute_loss(part, velocity)
                policy.set_gradient_reduction(part == slices[-1])
                # The mean over all rows of all processes.
                (losses.sum() * (policy.gradient_factor / total)).backward()
                if part == slices[-1]:
                    policy.average_gradients()
                row_losses.append(losses.detach())
                loss_sum += row_losses[-1].double().sum()
                for name, values in metrics.items():
                    summed = values.detach().double().sum()
                    metric_sums[name] = metric_sums.get(name, torch.zeros_like(summed)) + summed
            mean = (sum_over_processes(loss_sum) / total).item()
            norm = compute_gradient_norm(policy)
            # Before the step, and the same on every process, so that all of them stop together.
            if not (torch.isfinite(norm) and math.isfinite(mean)):
                raise self._build_error(batch, torch.cat(row_losses), mean, norm)
            torch.nn.utils.clip_grads_with_norm_(
                policy.parameters.values(), self.max_grad_norm, norm
            )
            self.optimizer.step()
            if self.average:
                # The parameters are the copy's now, so what follows them follows the copy.
                policy.blend_copy(f"{self.name}_old", self.average.decay_after_step(count))
        # Every process takes part in each sum, in the order of the names.
        means = {
            f"{self.name}/{name}": (sum_over_processes(values) / total).item()
            for name, values in metric_sums.items()
        }
        return {f"{self.name}/loss": mean, f"{self.name}/grad_norm": norm.item()} | means

    def _build_error(
        self, batch: CopyBatch, losses: Tensor, mean: float, norm: Tensor
    ) -> TrainingError:
        """Build the error that names the first row that is not finite, of the losses [M] of the
        rows of this process.
        """
        wrong = (~losses.isfinite()).nonzero()
        what = "gradient" if math.isfinite(mean) else "error of a row of another process"
        if len(wrong):
            what = f"error of {batch.describe_row(int(wrong[0]))}"
        return TrainingError(
            f"not finite: the {self.name} copy's {what} (gradient norm {norm.item()}); the step"
            f" was not taken. Lower algorithm.{self.name}_lr_factor or optimizer.lr"
        )
