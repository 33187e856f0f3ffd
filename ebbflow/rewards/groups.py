"""Call a reward as it declares, with samples, with the whole group of a prompt, or with pairs; and
check what it gets and returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.rewards import MAX_SCORE
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.watchdog import watch

ALONE = "the only image of its prompt here, and this reward compares images"
PAIRS_PER_CALL = 64
"""Bounds memory: a group of 24 images has 276 pairs, each of which is a copy of two images."""


def check_images(images: np.ndarray, prompts: Sequence[Prompt]) -> None:
    """Check that there is an image or a video for each prompt.

    Raises:
        RewardError: there is not, or they are not uint8 RGB.
    """
    if (
        images.dtype != np.uint8
        or images.ndim not in (4, 5)
        or images.shape[-1] != 3
        or 0 in images.shape[1:]
    ):
        raise RewardError(
            "images must be uint8 RGB [N, height, width, 3], or videos [N, frames, height, width,"
            f" 3], got {images.dtype} {list(images.shape)}"
        )
    if len(images) != len(prompts):
        raise RewardError(
            f"{len(images)} images for {len(prompts)} prompts; give one prompt per image"
        )


def score_samples(reward: Reward, samples: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
    """Score samples [N, ...] in the form that the reward declares (``Reward.scores``), each against
    its prompt or against the others of its prompt, and check what the reward returned.

    Raises:
        RewardError: the reward breaks its contract, or one of videos [N, frames, ...] gets images.
    """
    if reward.scores == "videos" and samples.ndim == 4:
        raise RewardError(
            f"the reward {reward.name!r} scores videos and got images; set model.frames, or"
            " leave it out"
        )
    # Other people's code and servers: what hangs is named.
    with watch(f"the reward {reward.name!r}, scoring {len(samples)} samples,"):
        if reward.scores in ("groups", "pairs"):
            result = score_groups(reward, samples, prompts)
        else:
            result = reward(samples, prompts)
    return check_result(reward.name, result, len(samples))


def check_result(name: str, result: RewardResult, count: int) -> RewardResult:
    """Return the result, once every column of it is ``count`` numbers of at most ``MAX_SCORE``, or
    NaN.

    Raises:
        RewardError: it is of another class, or a column is not; names the reward and the column.
    """
    if not isinstance(result, RewardResult):
        raise RewardError(
            f"the reward {name!r} returned a {type(result).__name__}; return an"
            " ebbflow.rewards.base.RewardResult"
        )
    for column, values in {name: result.values, **result.metrics}.items():
        if np.shape(values) != (count,):
            raise RewardError(
                f"the reward {name!r} returned {column!r} of shape {np.shape(values)} for {count}"
                " images"
            )
        # False for NaN, which is a failure of one sample and no bug. A number beyond it is a bug
        # of the reward, and could overflow in the sums and squares of a run's statistics.
        beyond = np.flatnonzero(np.abs(values) > MAX_SCORE)
        if len(beyond):
            raise RewardError(
                f"the reward {name!r} returned {column!r} = {values[beyond[0]]:g} for image"
                f" {beyond[0]}; scores lie between {-MAX_SCORE:g} and {MAX_SCORE:g}, and NaN is a"
                " failure"
            )
    return result


def get_failure_reason(result: RewardResult, index: int) -> str:
    """Return why a sample has no score; a reward may say NaN and no more."""
    return result.failures.get(index, "no reason given")


def score_groups(reward: Reward, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
    """Score images [N, height, width, 3] against the others of their prompts; an image without
    others fails.

    Raises:
        RewardError: the reward breaks its contract.
    """
    values = np.full(len(images), np.nan)
    metrics = dict[str, np.ndarray]()
    failures = dict[int, str]()
    # Grouped by id and not by text: a table may have the same text twice, with another target.
    ids = np.array([prompt.prompt_id for prompt in prompts])
    for prompt_id in dict.fromkeys(ids.tolist()):
        rows = np.flatnonzero(ids == prompt_id)
        if len(rows) == 1:
            # Nothing to compare with. A call with one image would break the promise to rewards of
            # groups that there are at least two.
            failures[int(rows[0])] = ALONE
            continue
        prompt = prompts[rows[0]]
        if reward.scores == "pairs":
            result = _compute_win_rates_of_group(reward, images[rows], prompt)
        else:
            result = _call_and_check(reward, images[rows], prompt, "images")
        values[rows] = result.values
        # A group whose reward gave no such metric keeps NaN in the column.
        for name, column in result.metrics.items():
            metrics.setdefault(name, np.full(len(images), np.nan))[rows] = column
        failures |= {int(rows[index]): reason for index, reason in result.failures.items()}
    return RewardResult(values, metrics, failures)


def _compute_win_rates_of_group(reward: Reward, images: np.ndarray, prompt: Prompt) -> RewardResult:
    """Compare each pair of a group once and return the win rates, [N]; the metric
    ``<name>_unanswered`` is the share of an image's comparisons without an outcome.
    """
    pairs = list_balanced_pairs(len(images))
    # wins[i, j] is the probability that image i is better than image j, NaN where it is unknown.
    wins = np.full((len(images), len(images)), np.nan)
    reasons = dict[int, str]()
    for start in range(0, len(pairs), PAIRS_PER_CALL):
        part = pairs[start : start + PAIRS_PER_CALL]
        # An index of shape (P, 2) into (G, H, W, 3) copies the images of P pairs: (P, 2, H, W, 3).
        result = _call_and_check(reward, images[np.array(part)], prompt, "pairs")
        _check_probabilities(reward, result)
        for index, (first, second) in enumerate(part):
            outcome = result.values[index]
            if np.isnan(outcome):
                reason = get_failure_reason(result, index)
                # An image that fails is explained by the first of its comparisons that failed.
                reasons.setdefault(first, reason)
                reasons.setdefault(second, reason)
            else:
                wins[first, second] = outcome
                wins[second, first] = 1 - outcome
    values = compute_win_rates(wins)
    failures = {int(index): reasons[int(index)] for index in np.flatnonzero(np.isnan(values))}
    # The diagonal is NaN as well, and no comparison.
    unanswered = (np.isnan(wins).sum(1) - 1) / (len(images) - 1)
    return RewardResult(values, {f"{reward.name}_unanswered": unanswered}, failures)


def _call_and_check(reward: Reward, samples: np.ndarray, prompt: Prompt, noun: str) -> RewardResult:
    """Call a reward with samples of one prompt, and check the form of what it returns."""
    result = reward(samples, [prompt] * len(samples))
    if not isinstance(result, RewardResult):
        raise RewardError(
            f"the reward {reward.name!r} returned a {type(result).__name__}; return an"
            " ebbflow.rewards.base.RewardResult"
        )
    for column, values in {reward.name: result.values, **result.metrics}.items():
        if np.shape(values) != (len(samples),):
            raise RewardError(
                f"the reward {reward.name!r} returned {column!r} of shape {np.shape(values)} for a"
                f" group of {len(samples)} {noun}"
            )
    return result


def _check_probabilities(reward: Reward, result: RewardResult) -> None:
    # A metric of a pair has no image to whose row it could be written.
    if result.metrics:
        raise RewardError(
            f"the reward {reward.name!r} of pairs returned the metrics {', '.join(result.metrics)};"
            " a pair has none, declare scores = 'groups' for metrics of images"
        )
    outside = np.flatnonzero((result.values < 0) | (result.values > 1))
    if len(outside):
        raise RewardError(
            f"the reward {reward.name!r} returned {result.values[outside[0]]:g} for a pair; return"
            " the probability that its first image is better, from 0 to 1"
        )


def list_balanced_pairs(count: int) -> list[tuple[int, int]]:
    """Return every pair of ``count`` images once, as (first, second).

    Judges prefer the first of two images, or the second: each image is first as often as it is
    second, or once more.
    """
    # An odd distance keeps the order and an even one swaps it, so image i is first against every
    # second of its neighbours on either side.
    return [(i, j) if (j - i) % 2 else (j, i) for i, j in combinations(range(count), 2)]


def compute_win_rates(wins: np.ndarray) -> np.ndarray:
    """Return the share of its comparisons that each image won, float64 [N]; NaN where more than
    half of them have no outcome.

        w_i = mean over j != i of P(i is better than j)            (Pref-GRPO, 2508.20751)

    A comparison without an outcome is not counted; the published code counts it as half a win for
    both.

    Args:
        wins: [N, N], 1 where the image of the row is better than that of the column, 0 where it is
            worse, between them where it may be either; NaN where nothing is known. The diagonal is
            ignored.
    """
    others = ~np.eye(len(wins), dtype=bool)  # [N, N]
    has_outcome = others & ~np.isnan(wins)
    count = has_outcome.sum(1)  # [N]
    # np.maximum keeps 0 / 0 from warning; the line after it makes such an image NaN.
    rates = np.where(has_outcome, wins, 0.0).sum(1) / np.maximum(count, 1)
    return np.where(2 * count >= np.maximum(others.sum(1), 1), rates, np.nan)
