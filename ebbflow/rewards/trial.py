"""Try a user's own reward on noise, so that it fails before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.rewards import CustomRewardConfig
from ebbflow.rewards.base import NO_TARGET, RewardError, RewardResult
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.groups import score_samples

TRIED_FRAMES = 8
"""Of a video that a reward is tried on, at most."""


@dataclass(frozen=True)
class RewardTrial:
    """What a reward did with images of noise.

    Attributes:
        reasons: why it scored none of the images, a reason for each; empty if it scored one.
        ignores_prompt: whether it scored the images differently, and each of them alike for another
            prompt. False also where it was not tried.
    """

    reasons: list[str]
    ignores_prompt: bool = False


def try_reward(
    config: CustomRewardConfig, prompts: Sequence[Prompt], height: int, width: int, frames: int = 1
) -> RewardTrial:
    """Call a reward twice on noise, an image for each prompt, and check what it returns; a third
    time with the prompts of the other images. One that cannot run here is left alone, and so is one
    of latents or of sound, whose shape the model knows.

    One that compares gets two images of each prompt, and one of whole videos such where there are
    ``frames``.

    Raises:
        RewardError: it fails, has nothing to read in any of the prompts, returns anything but a
            ``RewardResult`` with a number or NaN for each image, or scores the same images
            differently.
        RecipeError: nothing can be imported from its path.
    """
    reward = load_reward(config)
    if reward.explain_unavailable() or reward.scores in ("latents", "sounds"):
        return RewardTrial([])
    name = f"the reward {reward.name!r}, {config.path},"
    if reward.compares:
        prompts = [prompt for prompt in prompts for _ in range(2)]
    shape: tuple[int, ...] = (len(prompts), height, width, 3)
    if reward.scores == "videos" and frames > 1:
        shape = (len(prompts), min(frames, TRIED_FRAMES), height, width, 3)
    # A seed of its own, so that the trial shifts no random number of the run.
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    try:
        # A copy for each call: a reward that writes into its images would pass on changed ones.
        results = [
            score_samples(reward, images.copy(), rows) for rows in (prompts, prompts, prompts[::-1])
        ]
    except Exception as error:  # a user's own code can raise anything
        reason = sanitize_text(f"{type(error).__name__}: {error}")
        raise RewardError(
            f"{name} fails on {len(images)} images of {height} x {width} pixels: {reason}"
        ) from error
    first, second, swapped = (np.asarray(result.values, np.float64) for result in results)
    if not np.array_equal(first, second, equal_nan=True):
        raise RewardError(
            f"{name} gave the same images {first.tolist()} and then {second.tolist()}; a reward"
            " must not draw at random"
        )
    if np.isfinite(first).any():
        # A reward that scores all noise 0, as one that reads text does, says nothing here.
        tells_images_apart = len(np.unique(first)) > 1
        differs = len({prompt.prompt for prompt in prompts}) > 1
        is_equal = np.array_equal(first, swapped, equal_nan=True)
        return RewardTrial([], ignores_prompt=tells_images_apart and differs and is_equal)
    return RewardTrial(_explain_missing_scores(name, results[0]))


def _explain_missing_scores(name: str, result: RewardResult) -> list[str]:
    """Return why a reward scored none of the images, a reason for each.

    Raises:
        RewardError: none of the prompts has what it reads.
    """
    indices = range(len(np.asarray(result.values)))
    reasons = [result.failures.get(index, "without a reason") for index in indices]
    # Images of noise may have nothing to score. A prompt without a text never has.
    if reasons and all(reason == NO_TARGET for reason in reasons):
        raise RewardError(
            f"{name} scores none of the {len(reasons)} prompts that it was tried on: {NO_TARGET}"
        )
    return [sanitize_text(reason) for reason in reasons]
