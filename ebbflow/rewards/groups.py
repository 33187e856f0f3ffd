"""Rewards that compare the images of a prompt with each other: scored group by group, and win rates
from comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.rewards.base import (
    AnyReward,
    GroupReward,
    LatentReward,
    RewardError,
    RewardResult,
    VideoReward,
)

ALONE = "the only image of its prompt here, and this reward compares images"


def score_samples(reward: AnyReward, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
    """The scores of images [N, height, width, 3], each against its prompt, or against all others of
    its prompt; or of latents.

    Raises:
        RewardError: a reward that compares breaks its contract, or one that scores videos, [N,
            frames, ...], gets images.
    """
    if isinstance(reward, GroupReward):
        return score_groups(reward, images, prompts)
    if isinstance(reward, LatentReward):
        return reward.score_latents(images, prompts)
    if not isinstance(reward, VideoReward):
        return reward(images, prompts)
    if images.ndim == 4:
        raise RewardError(
            f"the reward {reward.name!r} scores videos and got images; set model.frames, or leave"
            " it out"
        )
    return reward.score_videos(images, prompts)


def score_groups(
    reward: GroupReward, images: np.ndarray, prompts: Sequence[Prompt]
) -> RewardResult:
    """The scores of images [N, ...], whose whole groups they are; an image without others of its
    prompt fails.

    Raises:
        RewardError: the reward breaks its contract.
    """
    values = np.full(len(images), np.nan)
    metrics = dict[str, np.ndarray]()
    failures = dict[int, str]()
    ids = np.array([prompt.prompt_id for prompt in prompts])
    for prompt_id in dict.fromkeys(ids.tolist()):
        rows = np.flatnonzero(ids == prompt_id)
        if len(rows) == 1:
            failures[int(rows[0])] = ALONE
            continue
        result = _compare_group(reward, images[rows], prompts[rows[0]])
        values[rows] = result.values
        for name, column in result.metrics.items():
            metrics.setdefault(name, np.full(len(images), np.nan))[rows] = column
        failures |= {int(rows[index]): reason for index, reason in result.failures.items()}
    return RewardResult(values, metrics, failures)


def _compare_group(reward: GroupReward, images: np.ndarray, prompt: Prompt) -> RewardResult:
    result = reward.compare(images, prompt)
    if not isinstance(result, RewardResult):
        raise RewardError(
            f"the reward {reward.name!r} returned a {type(result).__name__}; return an"
            " ebbflow.rewards.base.RewardResult"
        )
    for column, values in {reward.name: result.values, **result.metrics}.items():
        if np.shape(values) != (len(images),):
            raise RewardError(
                f"the reward {reward.name!r} returned {column!r} of shape {np.shape(values)} for a"
                f" group of {len(images)} images"
            )
    return result


def compute_win_rates(wins: np.ndarray) -> np.ndarray:
    """The share of its comparisons that each image won, float64 [N]; NaN where more than half of
    them have no outcome.

        w_i = mean over j != i of P(i is better than j)            (Pref-GRPO, 2508.20751)

    Args:
        wins: [N, N], 1 where the image of the row is better than that of the column, 0 where it is
            worse, between them where it may be either; NaN where nothing is known. The diagonal is
            not looked at.

    A comparison without an outcome is left out; the published code counts it as half a win for
    both.
    """
    others = ~np.eye(len(wins), dtype=bool)
    known = others & ~np.isnan(wins)
    count = known.sum(1)
    rates = np.where(known, wins, 0.0).sum(1) / np.maximum(count, 1)
    return np.where(2 * count >= np.maximum(others.sum(1), 1), rates, np.nan)
