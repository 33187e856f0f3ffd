"""Types of GPU: their memory, and what they compute in the network of a diffusion model."""

from __future__ import annotations

from typing import NamedTuple


class GpuType(NamedTuple):
    """A type of GPU, by its data sheet.

    Attributes:
        memory: GiB, as nvidia-smi shows them, rounded down.
        peak_tflops: dense matrix products in bfloat16, in 10^12 operations per second.
    """

    memory: int
    peak_tflops: float

    @property
    def sustained_tflops(self) -> float:
        """What a network sustains, roughly: measure your own, and give ``--tflops``."""
        return SUSTAINED * self.peak_tflops


SUSTAINED = 0.4
"""Share of the data sheet's number; transformers of this kind reach a third to half of it."""
GPU_TYPES = {
    "l4": GpuType(22, 121),
    "a10g": GpuType(22, 70),
    "l40s": GpuType(45, 362),
    "a100": GpuType(40, 312),
    "a100-80gb": GpuType(80, 312),
    "h100": GpuType(79, 989),
    "h200": GpuType(140, 989),
    "b200": GpuType(179, 2250),
}
