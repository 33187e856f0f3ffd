"""Prompts and images to score, in one line each."""

import numpy as np

from ebbflow.data.prompts import Prompt


def as_prompt(index: int, target: str | None) -> Prompt:
    return Prompt(index, f'"{target}"', "", target, "test", "train", "{}")


def as_rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(grey, np.uint8)[..., None], 3, axis=-1)
