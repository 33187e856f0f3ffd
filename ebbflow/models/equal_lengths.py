"""Networks whose rows must have prompts of one length, as they take no mask or count positions from
the end of the prompt: rows of equal lengths go through them together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

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
    lengths = conditioning["mask"].sum(1)
    different = lengths.unique().tolist()
    if len(different) > 1 and isinstance(transformer, FSDPModule):
        raise ModelError(
            f"prompts of {' and '.join(map(str, different))} tokens in one batch: processes"
            " that share the weights must call the network equally often; take prompts of"
            " one length"
        )
    rows = [(lengths == length).nonzero()[:, 0] for length in different]
    velocities = [
        run_rows(latents[index], sigma[index], conditioning["embeds"][index, :length])
        for index, length in zip(rows, different, strict=True)
    ]
    order = torch.cat(rows).argsort()
    return torch.cat(velocities)[order]
