"""Bytes of activations: what a forward pass keeps, with and without gradients.

The formulas are those of the docstring of ``ebbflow.estimate.memory``.
"""

from __future__ import annotations

import math

from ebbflow.data.model_sizes import BLOCK_BYTES, BYTES, ModelSizes
from ebbflow.recipe.model import Precision

MODULATION = 1.5
"""Factor for blocks whose norms are shifted, scaled and gated; measured
(``tests/estimate/test_activations.py``). Not under a LoRA in 16 bits, which runs without autocast:
there a frozen layer without adapters keeps no input, and a norm is one kernel
(``benchmarks/results/memory_count.md``).
"""
INFERENCE_NUMBERS = 10
"""Elements alive per token and unit of width in a pass without gradients."""


def activation_bytes(
    sizes: ModelSizes,
    tokens: int,
    precision: Precision,
    checkpointing: bool,
    every: int = 1,
    adapted: bool = False,
) -> int:
    """Return the bytes that a forward pass of one sample saves for the backward pass.

    Args:
        checkpointing: blocks recompute their activations (``model.gradient_checkpointing``).
        every: one block in so many recomputes (``model.gradient_checkpointing_every``).
        adapted: only a LoRA is trained.
    """
    saved_per_block = block_bytes(sizes.width, tokens, precision, adapted)
    num_recomputed = math.ceil(sizes.blocks / every) if checkpointing else 0
    # In the backward pass, one recomputed block at a time has its activations again.
    num_saved = sizes.blocks - num_recomputed + (1 if num_recomputed else 0)
    # A recomputed block saves its input alone: tokens * width elements.
    inputs = num_recomputed * tokens * sizes.width * BYTES[precision]
    return inputs + num_saved * saved_per_block


def block_bytes(width: int, tokens: int, precision: Precision, adapted: bool = False) -> int:
    """Return the bytes that one block saves of one sample for the backward pass."""
    factor = 1 if adapted and precision != "float32" else MODULATION
    # BLOCK_BYTES is per element of 16 bits.
    return int(factor * BLOCK_BYTES * tokens * width * BYTES[precision] / 2)


def inference_bytes(width: int, tokens: int, precision: Precision) -> int:
    """Return the bytes alive at once in a forward pass of one sample without gradients."""
    return INFERENCE_NUMBERS * tokens * width * BYTES[precision]
