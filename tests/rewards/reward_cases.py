"""Prompts and images to score, in one line each, and rewards that a path leads to."""

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.rewards.base import Reward, RewardResult


def as_prompt(index: int, target: str | None) -> Prompt:
    return Prompt(index, f'"{target}"', "", target, "test", "train", "{}")


def as_rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(grey, np.uint8)[..., None], 3, axis=-1)


class Brightness(Reward):
    def __call__(self, images, prompts):
        return RewardResult(images.mean((1, 2, 3)) / 255)


class Absent(Brightness):
    def explain_unavailable(self):
        return "not on this machine"
