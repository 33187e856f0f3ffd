"""An update that goes back through the rollout's own forward passes: the Retain of LeanGRPO
(2609.03528).

Until the first update of a step no weight has moved since its rollout, and the update would predict
the very velocities that the rollout predicted, at the same latents. So the rollout predicts its
trained steps with gradient and keeps their graphs, and the update goes backwards through them: it
has no forward passes of its own. Its passes are the rollout's then, with the same rows in the same
order, so that its gradient is what repeated forward passes would give, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ebbflow.training.batches import TrajectoryBatch

RolloutVelocities = Sequence[Sequence[Tensor]]
"""Of each micro-batch of a rollout, in their order, the velocities of its W trained steps, each [n,
...] with its graph.
"""


def reuse_rollout_forward(
    batch: TrajectoryBatch, numbers: np.ndarray, velocities: RolloutVelocities
) -> TrajectoryBatch:
    """The rows of a batch, ordered by the rollout's forward passes: each pass is a group, and its
    velocities are known.

    They are not known where a row that is left out is not finite: zero times its activations would
    be no zero in the gradient.

    Args:
        batch: M rows.
        numbers: integer [M], ascending: what number each row is of all [N, W] rows of the rollout.
    """
    steps = len(velocities[0])
    sizes = np.array([len(part[0]) for part in velocities])
    sample, column = np.divmod(numbers, steps)
    part = np.searchsorted(sizes.cumsum(), sample, side="right")
    order = np.lexsort((sample, column, part))
    row = (sample - (sizes.cumsum() - sizes)[part])[order]  # in its pass
    passes, first, group = np.unique(
        (part * steps + column)[order], return_index=True, return_inverse=True
    )
    predicted = {}
    for number, start, kept in zip(
        passes.tolist(), first.tolist(), np.split(row, first[1:]), strict=True
    ):
        velocity = velocities[number // steps][number % steps]
        if len(kept) == len(velocity):
            predicted[start] = velocity
        elif bool(velocity.isfinite().all()):
            predicted[start] = velocity[torch.from_numpy(kept).to(velocity.device)]
    rows = torch.from_numpy(order).to(batch.weight.device)
    inputs = batch.inputs
    return replace(
        batch,
        inputs=replace(
            inputs,
            latents=inputs.latents[rows],
            sigma=inputs.sigma[rows],
            sample_index=inputs.sample_index[rows],
            predicted=predicted,
        ),
        weight=batch.weight[rows],
        group_index=torch.from_numpy(group).to(rows.device),
        next_latents=batch.next_latents[rows],
        steps=batch.steps[rows],
        old_mean=batch.old_mean[rows],
        old_log_prob=batch.old_log_prob[rows],
        advantage=batch.advantage[rows],
        keys=batch.keys.select_samples(order),
    )
