"""``jpeg_compressibility`` and ``jpeg_incompressibility``: how large an image is as a JPEG file
(DDPO, 2305.13301).

Both rewards look at the image alone. They say nothing about its worth: they are the classic check
that a pipeline can move a policy either way, and a guardrail against grain.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt

QUALITY = 95
KILOBYTE = 1000
SCALE = 500
"""Kilobytes that are worth 1."""


class JpegCompressibilityConfig(RewardConfig):
    """-kB / 500 of the image as a JPEG of quality 95: plain images score higher, below 0."""

    name: Literal["jpeg_compressibility"] = "jpeg_compressibility"

    @property
    def ignores_prompt(self) -> bool:
        return True

    def build(self) -> Reward:
        return JpegCompressibility()


class JpegIncompressibilityConfig(RewardConfig):
    """kB / 500 of the image as a JPEG of quality 95: images full of detail score higher, above
    0."""

    name: Literal["jpeg_incompressibility"] = "jpeg_incompressibility"

    @property
    def ignores_prompt(self) -> bool:
        return True

    def build(self) -> Reward:
        return JpegIncompressibility()


class JpegCompressibility(Reward):
    """-kB / 500 of the image as a JPEG of quality 95, below 0: plain images score higher."""

    name = "jpeg_compressibility"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        return RewardResult(-measure_kilobytes(images) / SCALE)


class JpegIncompressibility(Reward):
    """kB / 500 of the image as a JPEG of quality 95, above 0: images full of detail score
    higher."""

    name = "jpeg_incompressibility"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        return RewardResult(measure_kilobytes(images) / SCALE)


def measure_kilobytes(images: np.ndarray) -> np.ndarray:
    """Return the sizes in units of 1000 bytes, float64 [N], of uint8 RGB images [N, height, width,
    3] as JPEG files.
    """
    import numpy as np
    from PIL import Image

    sizes = []
    for image in images:
        file = io.BytesIO()
        # Pillow's default subsampling, as in DDPO's published code.
        Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
        sizes.append(len(file.getvalue()))
    return np.array(sizes, np.float64) / KILOBYTE
