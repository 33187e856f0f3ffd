"""``similarity``: how much an image looks like the clean rendering of its target. A guard that needs nothing installed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.models.lettering import render_text
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.text import NO_TARGET

SHIFT = 2
"""Pixels by which the image may be off in each direction."""
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue in grey (ITU-R BT.601)."""


class Similarity:
    """Zero-mean normalised cross-correlation of the grey image with the target's rendering, the best over small shifts.

    In [-1, 1] and used as it is: 1 is the rendering up to brightness and contrast, 0 is unrelated (or one flat colour),
    negative is inverted. Letters of another font or size score low even where a reader reads them well.
    """

    name = "similarity"

    def unavailable(self) -> str | None:
        return None

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        values = np.full(len(images), np.nan)
        failures: dict[int, str] = {}
        for index, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            if prompt.target is None:
                failures[index] = NO_TARGET
                continue
            try:
                rendering = render_text(prompt.target, *image.shape[:2])
            except ValueError as error:
                failures[index] = str(error)
            else:
                values[index] = correlation(image @ LUMA, rendering)
        return RewardResult(values, failures=failures)


def correlation(image: np.ndarray, rendering: np.ndarray) -> float:
    """Largest zero-mean normalised cross-correlation over shifts of the rendering by up to ``SHIFT`` pixels, in [-1, 1].

    Both are grey [height, width]; what a shift brings in from outside is white.
    """
    padded = np.pad(rendering.astype(np.float64), SHIFT, constant_values=255)
    shifted = np.lib.stride_tricks.sliding_window_view(padded, rendering.shape)
    seen = _standardised(image.astype(np.float64))
    best = max(float(np.vdot(seen, _standardised(view))) for row in shifted for view in row)
    return min(max(best, -1.0), 1.0)


def _standardised(pixels: np.ndarray) -> np.ndarray:
    """Zero mean and unit length; a flat image becomes zeros, which correlate with nothing."""
    centred = pixels - pixels.mean()
    norm = np.linalg.norm(centred)
    # A flat image is flat only up to rounding: less than a thousandth of a grey level per pixel is no picture.
    return centred / norm if norm > 1e-3 * np.sqrt(pixels.size) else np.zeros_like(pixels)
