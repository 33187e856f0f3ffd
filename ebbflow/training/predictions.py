"""What the policy and its copies predict at the rows of a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ebbflow.algorithms.base import CopyName
from ebbflow.models.base import predict, predict_checkpointed
from ebbflow.training.batches import ForwardInputs
from ebbflow.training.distributed import all_reduce_max
from ebbflow.training.policy import Policy


def predict_velocity(policy: Policy, inputs: ForwardInputs, part: slice | Tensor) -> Tensor:
    """Predict at some rows with the policy as it is, with gradient where that is on."""
    forward = predict_checkpointed if inputs.checkpointed and torch.is_grad_enabled() else predict
    return forward(policy.model, *inputs.model_arguments(part))


def predict_velocities_of_copy(
    policy: Policy, copy: CopyName, inputs: ForwardInputs, slices: list[slice]
) -> Tensor:
    """Predict with a policy copy over some parts: one swap of the parameters for all of them."""
    with policy.use_copy(copy), policy.keep_gathered():
        return torch.cat([predict_velocity(policy, inputs, part) for part in slices])


def predict_velocities_of_teachers(
    policy: Policy,
    teacher_rows: Mapping[str, Tensor],
    inputs: ForwardInputs,
    slices: list[slice],
) -> Tensor:
    """Predict each row with its own teacher: a teacher for its rows alone, in parts of the usual
    size.
    """
    size = max(part.stop - part.start for part in slices)
    velocities = []
    for copy, rows in teacher_rows.items():
        # Sharded processes communicate in every pass, so all of them take as many: one without rows
        # left predicts its first again, and throws that away.
        passes = all_reduce_max(math.ceil(len(rows) / size))
        if not passes:
            continue  # the same on every process
        with policy.use_copy(copy), policy.keep_gathered():
            for part in rows.tensor_split(passes):
                if len(part):
                    velocities.append(predict_velocity(policy, inputs, part))
                else:
                    predict_velocity(policy, inputs, slice(0, 1))
    # From the order of teachers back to the order of rows.
    order = torch.cat(list(teacher_rows.values())).argsort()
    return torch.cat(velocities)[order]
