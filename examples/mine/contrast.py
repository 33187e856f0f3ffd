"""A reward for images that are clearly light and dark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.rewards.base import Reward, RewardResult

LUMA = np.array([0.299, 0.587, 0.114])
"""Shares of red, green and blue in the luminance (ITU-R BT.601)."""


class Contrast(Reward):
    """Standard deviation of the luminance over half its range, in [0, 1]: 0 for one grey, 1 for
    half black and half white.
    """

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        luminance = images @ LUMA / 255
        return RewardResult(luminance.std((1, 2)) / 0.5, {"brightness": luminance.mean((1, 2))})
