"""AdamW whose moments are kept in 8 bits (2110.02861), of bitsandbytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from ebbflow.recipe.optimizers import OptimizerFactory

if TYPE_CHECKING:
    import torch

    from ebbflow.recipe.optimizer_config import OptimizerConfig

BLOCK = 256
"""Numbers of a moment that share a scale."""


class AdamW8Bit(OptimizerFactory):
    """bitsandbytes' AdamW. Parameters of fewer than 4,096 elements have moments of 32 bits."""

    name: ClassVar = "adamw_8bit"
    summary: ClassVar = (
        "AdamW of bitsandbytes, with moments of 8 bits (2110.02861) in a quarter of the memory; one"
        " process trains"
    )
    package: ClassVar = "bitsandbytes"
    extra: ClassVar = "8bit"
    state_is_divisible: ClassVar = False
    # What the 8 bits of a moment mean: one table for the moments of all parameters.
    shared_state: ClassVar = ("qmap1", "qmap2")

    def build_optimizer(
        self, groups: list[dict[str, Any]], config: OptimizerConfig
    ) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit  # takes seconds

        betas = (config.betas[0], config.betas[1])
        optimizer: torch.optim.Optimizer = AdamW8bit(
            groups, config.lr, betas, config.eps, config.weight_decay
        )
        return optimizer

    def count_state_bytes(self, num_parameters: int) -> int:
        # Two moments of a byte, with a scale of 4 bytes for each block.
        return 2 * (num_parameters + 4 * math.ceil(num_parameters / BLOCK))


ADAMW_8BIT = AdamW8Bit()
