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
    """Order the rows of a batch by the rollout's forward passes: each pass is a group, and its
    velocities are known.

    Example: four samples in micro-batches of two with two trained steps, all rows kept. The passes
    are (micro-batch 0, step 0), (0, 1), (1, 0), (1, 1), and the rows, as (sample, step)::

        before: (0, 0) (0, 1) (1, 0) (1, 1) (2, 0) (2, 1) (3, 0) (3, 1)
        after:  (0, 0) (1, 0) | (0, 1) (1, 1) | (2, 0) (3, 0) | (2, 1) (3, 1)

    Args:
        batch: M rows.
        numbers: integer [M], ascending: what number each row is of all [N, W] rows of the rollout.
    """
    num_steps = len(velocities[0])
    sizes = np.array([len(part[0]) for part in velocities])  # samples of each micro-batch
    sample, column = np.divmod(numbers, num_steps)
    micro_batch = np.searchsorted(sizes.cumsum(), sample, side="right")
    order = np.lexsort((sample, column, micro_batch))  # the last key is the first to sort by
    first_samples = sizes.cumsum() - sizes
    row_in_pass = (sample - first_samples[micro_batch])[order]
    passes, first_rows, group_index = np.unique(
        (micro_batch * num_steps + column)[order], return_index=True, return_inverse=True
    )
    predicted = {}
    for number, first_row, rows_of_pass in zip(
        passes.tolist(), first_rows.tolist(), np.split(row_in_pass, first_rows[1:]), strict=True
    ):
        velocity = velocities[number // num_steps][number % num_steps]
        if len(rows_of_pass) == len(velocity):
            predicted[first_row] = velocity
        elif bool(velocity.isfinite().all()):
            index = torch.from_numpy(rows_of_pass).to(velocity.device)
            predicted[first_row] = velocity[index]
        # Else a row that is left out may not be finite, and zero times its activations would be no
        # zero in the gradient. The update predicts this pass again, without that row.
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
        group_index=torch.from_numpy(group_index).to(rows.device),
        next_latents=batch.next_latents[rows],
        steps=batch.steps[rows],
        old_mean=None if batch.old_mean is None else batch.old_mean[rows],
        old_log_prob=batch.old_log_prob[rows],
        advantage=batch.advantage[rows],
        penalty_factor=None if batch.penalty_factor is None else batch.penalty_factor[rows],
        keys=batch.keys.select_samples(order),
    )
