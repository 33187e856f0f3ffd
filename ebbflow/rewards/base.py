"""What a reward is: a deterministic function from images and their prompts to one number per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ebbflow.data.prompts import Prompt


@dataclass(frozen=True)
class RewardResult:
    """Scores of N images.

    Attributes:
        values: float64 [N]; NaN where the scorer failed, never a made-up number.
        metrics: further float64 [N] columns that come with the same look at the images, by name.
        failures: the reason for every NaN in ``values``, by position.
    """

    values: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class Reward(Protocol):
    """Scores images, uint8 RGB [N, height, width, 3]; larger is better."""

    name: str

    def unavailable(self) -> str | None:
        """Why this reward cannot run on this machine and what would help, or None when it can."""

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult: ...
