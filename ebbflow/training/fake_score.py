"""The fake score of distribution matching: a copy of the policy that is trained on the student's
samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ebbflow.algorithms.base import expand_like
from ebbflow.models.base import predict
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.training.batches import split_into_passes
from ebbflow.training.distributed import sum_over_processes
from ebbflow.training.gradients import TrainingError, compute_gradient_norm
from ebbflow.training.latent_losses import LatentShare, average_over_latents
from ebbflow.training.matching import MatchingBatch
from ebbflow.training.optimizer import AnyOptimizer, build_optimizer
from ebbflow.training.policy import Policy

FAKE = "fake"
"""The policy copy."""


class FakeScore:
    """The policy copy ``fake`` and its optimiser, which is the policy's with another learning rate.

    It steps on the policy's own parameters while they are the copy's, so it trains adapters and
    sharded weights as well.
    """

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        lr_factor: float,
        latents: Sequence[LatentShare] = (),
    ) -> None:
        self.policy = policy
        self.latents = list(latents)
        self.max_grad_norm = config.max_grad_norm
        fake_config = config.model_copy(update={"lr": config.lr * lr_factor})
        self.optimizer: AnyOptimizer = build_optimizer(policy, fake_config)

    def update_fake_score(self, batch: MatchingBatch, passes: int) -> dict[str, float]:
        """Take one optimiser step on the mean of (scale v - target)^2 over the rows of all
        processes.

        Args:
            batch: this process's share of the rows.
            passes: forward-backward passes, the same number on every process.

        Raises:
            TrainingError: the loss or the gradient is not finite; the step was not taken.
        """
        policy = self.policy
        slices = split_into_passes(batch.group_index, passes)
        total = int(sum_over_processes(torch.tensor(len(batch.inputs), device=batch.weight.device)))
        error = torch.zeros((), dtype=torch.float64, device=batch.weight.device)
        row_errors = []
        # The parameters are the copy's inside the block. Gradients and the optimiser's state belong
        # to the parameter objects, so they are kept apart: the block clears gradients before and
        # after, and this optimiser has a state of its own.
        with policy.train_copy(FAKE):
            for part in slices:
                velocity = predict(policy.model, *batch.noised.model_arguments(part))  # [m, ...]
                miss = expand_like(batch.scale[part], velocity) * velocity - batch.target[part]
                errors = average_over_latents(miss**2, self.latents)
                policy.set_gradient_reduction(part == slices[-1])
                # The mean over all rows of all processes.
                (errors.sum() * (policy.gradient_factor / total)).backward()
                if part == slices[-1]:
                    policy.average_gradients()
                row_errors.append(errors.detach())
                error += row_errors[-1].double().sum()
            mean = (sum_over_processes(error) / total).item()
            norm = compute_gradient_norm(policy)
            # Before the step, and the same on every process, so that all of them stop together.
            if not (torch.isfinite(norm) and math.isfinite(mean)):
                raise _non_finite_error(batch, torch.cat(row_errors), mean, norm)
            torch.nn.utils.clip_grads_with_norm_(
                policy.parameters.values(), self.max_grad_norm, norm
            )
            self.optimizer.step()
        return {"fake/loss": mean, "fake/grad_norm": norm.item()}


def _non_finite_error(
    batch: MatchingBatch, errors: Tensor, mean: float, norm: Tensor
) -> TrainingError:
    """Build the error that names the first row that is not finite, of the errors [M] of the rows of
    this process.
    """
    wrong = (~errors.isfinite()).nonzero()
    what = "gradient" if math.isfinite(mean) else "error of a row of another process"
    if len(wrong):
        what = f"error of {batch.describe_row(int(wrong[0]))}"
    return TrainingError(
        f"not finite: the fake score's {what} (gradient norm {norm.item()}); the step was not"
        " taken. Lower algorithm.fake_lr_factor or optimizer.lr"
    )
