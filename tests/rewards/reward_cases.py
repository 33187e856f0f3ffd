"""Prompts and images to score, in one line each, and rewards to score them with."""

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


IMAGES = np.zeros((3, 8, 8, 3), np.uint8)
PROMPTS = [as_prompt(index, "AB") for index in range(3)]


class Fixed(Reward):
    """A reward that gives fixed values."""

    def __init__(self, name, values, reason=None, metrics=None, failures=None):
        self.name = name
        self.reason = reason
        self.result = RewardResult(np.asarray(values, np.float64), metrics or {}, failures or {})

    def explain_unavailable(self):
        return self.reason

    def __call__(self, images, prompts):
        return self.result


class Watched(Reward):
    """The grey of an image; fails on black ones. It remembers what it was shown."""

    name = "grey"

    def __init__(self):
        self.images = None
        self.prompts = None

    def __call__(self, images, prompts):
        self.images, self.prompts = images, list(prompts)
        values = images.mean((1, 2, 3))
        failures = {
            int(index): f"black, {prompts[index].prompt}" for index in np.flatnonzero(values == 0)
        }
        values[list(failures)] = np.nan
        return RewardResult(values, {"squared": values**2}, failures)


def as_videos(greys):
    """Videos of 4 x 6 pixels, each frame of one grey: [N, frames] -> [N, frames, 4, 6, 3]."""
    return np.asarray(greys, np.uint8)[..., None, None, None] * np.ones((4, 6, 3), np.uint8)


class OfTheirImages(Reward):
    """Scores images by their first pixel, and says which prompts it was asked about; a pixel of 0
    is a failure.
    """

    has_gradient = True

    def __init__(self, name):
        self.name = name
        self.asked = []

    def __call__(self, images, prompts):
        self.asked.append([prompt.prompt_id for prompt in prompts])
        values = images[:, 0, 0, 0].astype(float)
        lost = np.flatnonzero(values == 0)
        values[lost] = np.nan
        return RewardResult(
            values, {f"{self.name}_half": values / 2}, {int(index): "black" for index in lost}
        )

    def score_with_gradient(self, images, prompts):
        self.asked.append([prompt.prompt_id for prompt in prompts])
        return images[:, 0, 0, 0]
