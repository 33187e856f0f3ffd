"""Rewards by name, and how several become the one number that is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.algorithms import import_path
from ebbflow.recipe.recipe import RewardTerm, score_column
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from ebbflow.rewards.ocr import Ocr
from ebbflow.rewards.similarity import Similarity
from ebbflow.rewards.tesseract import Tesseract

REWARDS: dict[str, Callable[[], Reward]] = {
    "ocr": Ocr,
    "tesseract": Tesseract,
    "similarity": Similarity,
    "jpeg_compressibility": JpegCompressibility,
    "jpeg_incompressibility": JpegIncompressibility,
}
"""Every reward. A new one is entered here and in ``REWARD_NAMES`` of the recipe."""


class RewardError(RuntimeError):
    """Scoring cannot go on: a reward is missing, broken, or failed on too many samples."""


@dataclass(frozen=True)
class ScoreTable:
    """Scores of N images.

    Attributes:
        reward: float64 [N], the weighted sum of the trained terms; NaN where any of them failed.
        metrics: float64 [N] columns: every reward by its name and what it measures beside; NaN where it failed.
        failures: why, for every image on which any reward or guard failed; None elsewhere.
    """

    reward: np.ndarray
    metrics: dict[str, np.ndarray]
    failures: list[str | None]

    @property
    def failed_share(self) -> float:
        """Share of the images that have no reward."""
        return float(np.isnan(self.reward).mean()) if len(self.reward) else 0.0


@dataclass(frozen=True)
class Scorer:
    """What a run scores with: the trained terms with their weights, the guards, and why some guards were left out."""

    terms: tuple[tuple[Reward, float], ...]
    guards: tuple[Reward, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each trained reward, by its column."""
        return {reward.name: weight for reward, weight in self.terms}

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> ScoreTable:
        """Score images, uint8 RGB [N, height, width, 3], each against its prompt.

        Raises:
            RewardError: images and prompts do not go together, or a reward breaks its contract.
        """
        _check_images(images, prompts)
        rewards = [*(reward for reward, _ in self.terms), *self.guards]
        results = {reward.name: checked(reward.name, reward(images, prompts), len(images)) for reward in rewards}
        total = np.sum([weight * results[reward.name].values for reward, weight in self.terms], axis=0)
        return ScoreTable(total, _columns(results), _reasons(results, len(images)))


def load_rewards(names: Sequence[str]) -> list[Reward]:
    """The rewards of these names, or of these paths (``package.module:Name``, called without arguments).

    Raises:
        RewardError: there is no such reward.
        RecipeError: nothing can be imported from a path.
    """
    return [_reward(name) for name in names]


def _reward(name: str) -> Reward:
    if ":" in name:
        made = import_path(name)()
        if missing := [part for part in ("unavailable", "__call__") if not hasattr(made, part)]:
            raise RewardError(f"{name} is no reward: it has no {missing[0]!r}; ebbflow.rewards.base.Reward says what one has")
        made.name = score_column(name)
        return made
    if name not in REWARDS:
        raise RewardError(
            f"no reward is called {name!r}; there are {', '.join(REWARDS)}, or give package.module:Name of your own"
        )
    return REWARDS[name]()


def load_scorer(terms: Sequence[RewardTerm], guards: Sequence[str]) -> Scorer:
    """Everything a recipe scores with. Guards that cannot run here are left out with one warning.

    Raises:
        RewardError: a reward is unknown, or a term that is trained on cannot run here.
    """
    trained = load_rewards([term.name for term in terms])
    for reward in trained:
        if reason := reward.unavailable():
            raise RewardError(f"the reward {reward.name!r} is trained on and cannot run here: {reason}")
    watched = load_rewards(guards)
    names = [reward.name for reward in (*trained, *watched)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RewardError(f"two rewards are called {sorted(twice)[0]!r}; their scores would overwrite each other: rename one")
    left_out = {guard.name: reason for guard in watched if (reason := guard.unavailable())}
    if left_out:
        listed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"guards left out of this run: {listed}", stacklevel=2)
    kept = tuple(guard for guard in watched if guard.name not in left_out)
    return Scorer(tuple(zip(trained, (term.weight for term in terms), strict=True)), kept, left_out)


def require_scored(table: ScoreTable, limit: float) -> None:
    """Stop when more than the share ``limit`` of the images has no reward (``rewards.max_failed_share``).

    Raises:
        RewardError: with the count, the share and the first reasons.
    """
    if table.failed_share <= limit:
        return
    lost = np.flatnonzero(np.isnan(table.reward))
    reasons = list(dict.fromkeys(str(table.failures[index]) for index in lost))[:3]
    raise RewardError(
        f"{len(lost)} of {len(table.reward)} images ({table.failed_share:.1%}) have no reward, "
        f"more than rewards.max_failed_share = {limit:.1%} allows; the first reasons: {' | '.join(reasons)}"
    )


def checked(name: str, result: RewardResult, count: int) -> RewardResult:
    """The result itself, once its columns are ``count`` numbers or NaN each.

    Raises:
        RewardError: names the reward and the column that is not.
    """
    for column, values in {name: result.values, **result.metrics}.items():
        if np.shape(values) != (count,):
            raise RewardError(f"the reward {name!r} gave {column!r} the shape {np.shape(values)} for {count} images")
        if np.isinf(values).any():
            raise RewardError(f"the reward {name!r} gave an infinite {column!r} for image {np.flatnonzero(np.isinf(values))[0]}")
    return result


def _check_images(images: np.ndarray, prompts: Sequence[Prompt]) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise RewardError(f"images must be uint8 RGB [N, height, width, 3], got {images.dtype} {list(images.shape)}")
    if len(images) != len(prompts):
        raise RewardError(f"{len(images)} images cannot be scored against {len(prompts)} prompts; give one prompt per image")


def _columns(results: dict[str, RewardResult]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for name, result in results.items():
        for column, values in {name: result.values, **result.metrics}.items():
            if column in columns or column == "reward":
                raise RewardError(f"the reward {name!r} gives a column {column!r}, which exists already; rename it")
            columns[column] = np.asarray(values, np.float64)
    return columns


def _reasons(results: dict[str, RewardResult], count: int) -> list[str | None]:
    reasons: list[list[str]] = [[] for _ in range(count)]
    for name, result in results.items():
        for index in np.flatnonzero(np.isnan(result.values)):
            reasons[index].append(f"{name}: {result.failures.get(int(index), 'no reason given')}")
    return ["; ".join(parts) or None for parts in reasons]
