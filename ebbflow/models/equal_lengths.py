"""Networks whose rows must have prompts of one length, as they take no mask or count positions from
the end of the prompt: rows of equal lengths go through them together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ebbflow.flow.host_values import read_on_host
from ebbflow.models.base import Conditioning, ModelError

RunRows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The velocity [M, ...] of latents [M, ...], sigmas [M] and embeddings [M, L, D] without padding.
"""


def run_by_length(
    transformer: object,
    latents: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    run_rows: RunRows,
) -> Tensor:
    """The velocity of all rows, [N, ...], with a pass for each length of a prompt.

    Raises:
        ModelError: the lengths differ, and processes share the weights.
    """
    lengths = read_on_host(conditioning["mask"]).sum(1).tolist()
    different = sorted(set(lengths))
    if len(different) > 1 and isinstance(transformer, FSDPModule):
        raise ModelError(
            f"prompts of {' and '.join(map(str, different))} tokens in one batch: processes"
            " that share the weights must call the network equally often; take prompts of"
            " one length"
        )
    velocities: dict[int, Tensor] = {}
    for length in different:
        rows = [row for row, own in enumerate(lengths) if own == length]
        # Stacked row by row: an index would be copied to the device.
        inputs = [
            torch.stack([values[row] for row in rows])
            for values in (latents, sigma, conditioning["embeds"])
        ]
        velocity = run_rows(inputs[0], inputs[1], inputs[2][:, :length])
        velocities |= dict(zip(rows, velocity, strict=True))
    return torch.stack([velocities[row] for row in range(len(lengths))])
