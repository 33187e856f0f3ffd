"""Rewards by name, and how several become the one number that is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.algorithms import import_path
from ebbflow.recipe.rewards import CustomRewardConfig, RewardConfig
from ebbflow.rewards.base import Reward, RewardResult

MAKERS: dict[str, str] = {
    "ocr": "ebbflow.rewards.ocr:Ocr",
    "tesseract": "ebbflow.rewards.tesseract:Tesseract",
    "similarity": "ebbflow.rewards.similarity:Similarity",
    "jpeg_compressibility": "ebbflow.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "ebbflow.rewards.jpeg:JpegIncompressibility",
    "pickscore": "ebbflow.rewards.clip:PickScore",
    "clipscore": "ebbflow.rewards.clip:ClipScore",
    "aesthetic": "ebbflow.rewards.aesthetic:Aesthetic",
    "imagereward": "ebbflow.rewards.imagereward:ImageReward",
    "hps": "ebbflow.rewards.hps:Hps",
    "remote": "ebbflow.rewards.remote:Remote",
    "vision_judge": "ebbflow.rewards.vision_judge:VisionJudge",
}
"""The class of every reward, imported when a recipe names it; called with its part of the recipe where it has options."""


FRAMES_SCORED = 8
"""Frames of a video that a reward looks at, evenly spaced from the first to the last; all of a shorter one."""


NO_PICTURE = "the model gave a latent that is not finite"


class RewardError(RuntimeError):
    """Scoring cannot go on: a reward is missing, broken, or failed on too many samples."""


@dataclass(frozen=True)
class ScoreTable:
    """Scores of N images or videos.

    Attributes:
        reward: float64 [N], the weighted sum of the trained terms; NaN where any of them failed.
        metrics: float64 [N] columns: every reward by its name and what it measures beside; NaN where it failed.
        failures: why, for everything on which any reward or guardrail failed; None elsewhere.
    """

    reward: np.ndarray
    metrics: dict[str, np.ndarray]
    failures: list[str | None]

    @property
    def failed_share(self) -> float:
        """Share of the images or videos that have no reward."""
        return float(np.isnan(self.reward).mean()) if len(self.reward) else 0.0

    def where(self, finite: np.ndarray) -> ScoreTable:
        """The same without the rows whose latent is not ``finite``, bool [N]: what was decoded from it is no picture."""
        broken = ~finite
        return ScoreTable(
            reward=np.where(broken, np.nan, self.reward),
            metrics={name: np.where(broken, np.nan, values) for name, values in self.metrics.items()},
            failures=[NO_PICTURE if lost else reason for lost, reason in zip(broken, self.failures, strict=True)],
        )

    @staticmethod
    def none(count: int, columns: Sequence[str], reason: str) -> ScoreTable:
        """``count`` images that could not be scored at all."""
        return ScoreTable(np.full(count, np.nan), {name: np.full(count, np.nan) for name in columns}, [reason] * count)

    @staticmethod
    def cat(parts: Sequence[ScoreTable]) -> ScoreTable:
        """The rows of all parts, at least one; NaN in the columns that a part has not."""
        names = dict.fromkeys(name for part in parts for name in part.metrics)
        nothing = [np.full(len(part.reward), np.nan) for part in parts]
        columns = {name: [part.metrics.get(name, none) for part, none in zip(parts, nothing, strict=True)] for name in names}
        return ScoreTable(
            reward=np.concatenate([part.reward for part in parts]),
            metrics={name: np.concatenate(column) for name, column in columns.items()},
            failures=[reason for part in parts for reason in part.failures],
        )


@dataclass(frozen=True)
class Scorer:
    """What a run scores with: the trained terms with their weights, the guardrails, and why some guardrails were left out."""

    rewards: tuple[tuple[Reward, float], ...]
    guardrails: tuple[Reward, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each trained reward, by its column."""
        return {reward.name: weight for reward, weight in self.rewards}

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> ScoreTable:
        """Score images, uint8 RGB [N, height, width, 3], or videos, [N, frames, height, width, 3], each against its prompt.

        Rewards look at images: what a reward says of a video, and what it measures beside, is the mean over ``FRAMES_SCORED``
        frames, each scored against the video's prompt. A frame that failed fails its video.

        Raises:
            RewardError: images and prompts do not go together, or a reward breaks its contract.
        """
        _check_images(images, prompts)
        score = _score if images.ndim == 4 else _score_videos
        rewards = [*(reward for reward, _ in self.rewards), *self.guardrails]
        results = {reward.name: score(reward, images, prompts) for reward in rewards}
        total = np.sum([weight * results[reward.name].values for reward, weight in self.rewards], axis=0)
        return ScoreTable(total, _columns(results), _reasons(results, len(images)))


def _score(reward: Reward, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
    return checked(reward.name, reward(images, prompts), len(images))


def _score_videos(reward: Reward, videos: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
    shown = scored_frames(videos.shape[1])
    frames = videos[:, shown].reshape(-1, *videos.shape[2:])
    result = _score(reward, frames, [prompt for prompt in prompts for _ in shown])
    return RewardResult(
        values=_over_frames(result.values, len(shown)),
        metrics={name: _over_frames(values, len(shown)) for name, values in result.metrics.items()},
        failures=_video_failures(result, shown),
    )


def scored_frames(count: int) -> np.ndarray:
    """Positions of the frames that are scored, of a video of ``count`` frames: ascending, each once."""
    return np.linspace(0, count - 1, min(count, FRAMES_SCORED)).round().astype(int)


def _over_frames(values: np.ndarray, frames: int) -> np.ndarray:
    """Means over the frames of each video; NaN where one of them is."""
    return np.asarray(values, np.float64).reshape(-1, frames).mean(axis=1)


def _video_failures(result: RewardResult, shown: np.ndarray) -> dict[int, str]:
    """The reason of each video's first frame that failed, and how many more failed."""
    reasons: dict[int, str] = {}
    for video, failed in enumerate(np.isnan(result.values).reshape(-1, len(shown))):
        if failed.any():
            first = int(failed.argmax())
            others = f" (and {failed.sum() - 1} more of {len(shown)} frames)" if failed.sum() > 1 else ""
            reason = _reason(result, video * len(shown) + first)
            reasons[video] = f"frame {shown[first]}: {reason}{others}"
    return reasons


def load_reward(config: RewardConfig) -> Reward:
    """The reward that a recipe describes, called as its scores are.

    Raises:
        RewardError: a user's own is no reward, or does not take its options.
        RecipeError: nothing can be imported from its path.
    """
    made = _custom(config) if isinstance(config, CustomRewardConfig) else _built_in(config)
    made.name = config.column
    return made


def _built_in(config: RewardConfig) -> Reward:
    make = import_path(MAKERS[config.name])
    return make(config) if type(config).model_fields.keys() > RewardConfig.model_fields.keys() else make()


def _custom(config: CustomRewardConfig) -> Reward:
    make = import_path(config.path)
    try:
        made = make(**config.options)
    except TypeError as error:
        raise RewardError(f"{config.path} cannot be called with the options {', '.join(config.options)}: {error}") from error
    if missing := [part for part in ("unavailable", "__call__") if not hasattr(made, part)]:
        raise RewardError(f"{config.path} is no reward: it has no {missing[0]!r}; ebbflow.rewards.base.Reward says what one has")
    return made


def load_scorer(rewards: Sequence[RewardConfig], guardrails: Sequence[RewardConfig]) -> Scorer:
    """Everything a recipe scores with. Guardrails that cannot run here are left out with one warning.

    Raises:
        RewardError: a term that is trained on cannot run here, or a user's own reward is none.
    """
    trained = [(load_reward(reward), reward.weight) for reward in rewards]
    for reward, _ in trained:
        if reason := reward.unavailable():
            raise RewardError(f"the reward {reward.name!r} is trained on and cannot run here: {reason}")
    watched = [load_reward(guardrail) for guardrail in guardrails]
    left_out = {guardrail.name: reason for guardrail in watched if (reason := guardrail.unavailable())}
    if left_out:
        listed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"guardrails left out of this run: {listed}", stacklevel=2)
    kept = tuple(guardrail for guardrail in watched if guardrail.name not in left_out)
    return Scorer(tuple(trained), kept, left_out)


def require_scored(table: ScoreTable, limit: float) -> None:
    """Stop when more than the share ``limit`` of the images has no reward (``max_failed_share``).

    Raises:
        RewardError: with the count, the share and the first reasons.
    """
    if table.failed_share <= limit:
        return
    lost = np.flatnonzero(np.isnan(table.reward))
    reasons = list(dict.fromkeys(str(table.failures[index]) for index in lost))[:3]
    raise RewardError(
        f"{len(lost)} of {len(table.reward)} images ({table.failed_share:.1%}) have no reward, "
        f"more than max_failed_share = {limit:.1%} allows; the first reasons: {' | '.join(reasons)}"
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
    if images.dtype != np.uint8 or images.ndim not in (4, 5) or images.shape[-1] != 3 or 0 in images.shape[1:]:
        raise RewardError(
            "images must be uint8 RGB [N, height, width, 3], or videos [N, frames, height, width, 3], "
            f"got {images.dtype} {list(images.shape)}"
        )
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
            reasons[index].append(f"{name}: {_reason(result, int(index))}")
    return ["; ".join(parts) or None for parts in reasons]


def _reason(result: RewardResult, index: int) -> str:
    return result.failures.get(index, "no reason given")
