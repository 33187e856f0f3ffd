"""Combine several rewards into the one number that a policy is trained on: the weighted sum, with
failures masked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import isabstract
from typing import TYPE_CHECKING, Any

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.data.sounds import Sounds
from ebbflow.recipe.plugins import import_object
from ebbflow.recipe.rewards import GUARDRAIL_COMPARES, CustomRewardConfig, RewardConfig
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.functions import FunctionReward, is_score_function
from ebbflow.rewards.groups import check_images, get_failure_reason, score_samples
from ebbflow.rewards.samples import (
    join_sounds,
    reads_any,
    replace_non_finite_latents,
)
from ebbflow.rewards.videos import score_videos, select_scored_frames

if TYPE_CHECKING:
    from torch import Tensor

NO_PICTURE = "the model generated a latent that is not finite"


@dataclass(frozen=True)
class ScoreTable:
    """Scores of N images or videos.

    Attributes:
        reward: float64 [N], the weighted sum of the trained rewards of each one's prompt set; NaN
            where any of them failed.
        metrics: float64 [N] columns: every reward by its name, and its own metrics; NaN where it
            failed, and where it does not score the prompt's set: there, a trained one is NaN
            although ``reward`` is finite.
        failures: the reasons, for every sample on which a reward or guardrail failed; None
            elsewhere.

    Example:
        Three images, trained on ``pickscore`` with weight 2 and watched by ``ocr``, which cannot
        read the last one. A guardrail that fails leaves the reward as it is::

            ScoreTable(
                reward=np.array([1.6, 1.7, 1.5]),
                metrics={
                    "pickscore": np.array([0.80, 0.85, 0.75]),
                    "ocr": np.array([1.0, 0.25, np.nan]),
                    "exact_match": np.array([1.0, 0.0, np.nan]),
                },
                failures=[None, None, "ocr: the prompt names no text; ..."],
            )
    """

    reward: np.ndarray
    metrics: dict[str, np.ndarray]
    failures: list[str | None]

    @property
    def scored_rows(self) -> np.ndarray:
        """Which samples have a reward, bool [N]."""
        return np.asarray(np.isfinite(self.reward))

    @property
    def failed_share(self) -> float:
        """Share of the samples without a reward."""
        return float(np.isnan(self.reward).mean()) if len(self.reward) else 0.0

    def fail_broken_latents(self, finite: np.ndarray) -> ScoreTable:
        """Return the table with the rows failed whose latent is not ``finite``, bool [N]: their
        images show nothing.
        """
        # The decoded image of NaN still has pixels, and a reward gives those a number like any.
        broken = ~finite
        return ScoreTable(
            reward=np.where(broken, np.nan, self.reward),
            metrics={
                name: np.where(broken, np.nan, values) for name, values in self.metrics.items()
            },
            failures=[
                NO_PICTURE if lost else reason
                for lost, reason in zip(broken, self.failures, strict=True)
            ],
        )

    @staticmethod
    def create_failed(count: int, columns: Sequence[str], reason: str) -> ScoreTable:
        """Return the table of ``count`` images that could not be scored at all."""
        return ScoreTable(
            np.full(count, np.nan),
            {name: np.full(count, np.nan) for name in columns},
            [reason] * count,
        )

    @staticmethod
    def concatenate(parts: Sequence[ScoreTable]) -> ScoreTable:
        """Return the rows of all parts (at least one); NaN in columns that a part lacks."""
        names = dict.fromkeys(name for part in parts for name in part.metrics)  # ordered and unique
        nothing = [np.full(len(part.reward), np.nan) for part in parts]
        columns = {
            name: [part.metrics.get(name, none) for part, none in zip(parts, nothing, strict=True)]
            for name in names
        }
        return ScoreTable(
            reward=np.concatenate([part.reward for part in parts]),
            metrics={name: np.concatenate(column) for name, column in columns.items()},
            failures=[reason for part in parts for reason in part.failures],
        )


@dataclass(frozen=True)
class Scorer:
    """The rewards of a run: trained ones with their weights, guardrails, and why some guardrails
    are unavailable.

    Attributes:
        of_sets: the options of those that score the prompts of some sets only, by their columns.
    """

    rewards: tuple[tuple[Reward, float], ...]
    guardrails: tuple[Reward, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    of_sets: Mapping[str, RewardConfig] = field(default_factory=dict)

    @property
    def trained_rewards(self) -> tuple[tuple[Reward, float], ...]:
        """Those with a part in the sum: a reward of weight 0 scores and moves nothing."""
        return tuple(row for row in self.rewards if row[1])

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each trained reward, by its column."""
        return {reward.name: weight for reward, weight in self.trained_rewards}

    @property
    def compares_groups(self) -> bool:
        """Whether it can score whole groups only."""
        return any(reward.compares for reward, _ in self.rewards)

    @property
    def reads_latents(self) -> bool:
        """Whether it needs the latents besides the images."""
        return reads_any(self.all_rewards, "latents")

    @property
    def reads_sounds(self) -> bool:
        """Whether it needs the sounds besides the videos."""
        return reads_any(self.all_rewards, "sounds")

    @property
    def trains_on_images(self) -> bool:
        """Whether a trained reward does; else nothing has to be decoded for their gradient."""
        return not all(reward.scores == "latents" for reward, _ in self.trained_rewards)

    @property
    def all_rewards(self) -> list[Reward]:
        return [*(reward for reward, _ in self.rewards), *self.guardrails]

    def without_group_rewards(self) -> Scorer:
        """Return the scorer without rewards that compare the images of a prompt with each other."""
        return replace(self, rewards=tuple(row for row in self.rewards if not row[0].compares))

    def compute_features(self, images: np.ndarray) -> np.ndarray | None:
        """Return features of images or videos, float32 [N, D], of the first reward or guardrail
        with ``compute_features``; None without one.

        Those of a video are of its middle frame.
        """
        # One network alone: distances in the features of two networks cannot be put together.
        for reward in self.all_rewards:
            if reward.has_features:
                is_video = images.ndim == 5
                frames = images[:, images.shape[1] // 2] if is_video else images
                return reward.compute_features(frames)
        return None

    def require_gradients(self, algorithm: str) -> None:
        """Check that all trained rewards are differentiable.

        Raises:
            RewardError: one is not; names it and the algorithm.
        """
        lacking = [reward.name for reward, _ in self.trained_rewards if not reward.has_gradient]
        if lacking:
            raise RewardError(
                f"{algorithm} learns from the gradient of the rewards, and {lacking[0]!r} has none;"
                " train on hpsv3, imagereward, pickscore, hps, clipscore, aesthetic, recognizer"
                " (glyph) or one of your own with 'score_with_gradient', or set algorithm.name to"
                " mix_grpo"
            )

    def score_latents_with_gradient(
        self, latents: Tensor, prompts: Sequence[Prompt], decode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return ``score_with_gradient`` of final latents, [N, ...], which are decoded only where
        a trained reward looks at images.

        Args:
            decode: from latents to images or videos as ``score_with_gradient`` takes them, with
                gradient.
        """
        # Decoding keeps the VAE's activations until the backward pass; latents alone need none.
        image_rewards = tuple(row for row in self.trained_rewards if row[0].scores != "latents")
        total = latents.new_zeros(len(latents))
        if image_rewards:
            image_scorer = replace(self, rewards=image_rewards)
            total = image_scorer.score_with_gradient(decode(latents), prompts)
        for reward, weight in self.trained_rewards:
            if reward.scores == "latents":
                total = self._add_weighted_scores(total, reward, weight, latents, prompts)
        return total

    def score_with_gradient(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return the weighted sum of the trained rewards with gradient, [N], where all are
        differentiable.

        Args:
            images: RGB in [0, 1], [N, 3, height, width], or videos, [N, frames, 3, height, width],
                as in a call.
        """
        if images.ndim == 5:
            # (N, F, 3, H, W) -> (N * F, 3, H, W): the mean over a video's scored frames, as in a
            # call, so that the policy is trained on the number that its run reports.
            frames = select_scored_frames(images.shape[1])
            scores = self.score_with_gradient(
                images[:, frames].flatten(0, 1), [prompt for prompt in prompts for _ in frames]
            )
            return scores.view(len(images), -1).mean(1)
        total = images.new_zeros(len(images))
        for reward, weight in self.trained_rewards:
            total = self._add_weighted_scores(total, reward, weight, images, prompts)
        return total

    def _add_weighted_scores(
        self,
        total: Tensor,
        reward: Reward,
        weight: float,
        images: Tensor,
        prompts: Sequence[Prompt],
    ) -> Tensor:
        """Return ``total``, [N], plus the weighted scores of a reward where it scores prompts."""
        rows = np.flatnonzero(self._select_prompts(reward, prompts)).tolist()
        if len(rows) == len(images):
            return total + weight * reward.score_with_gradient(images, prompts)
        # A reward that does not score the set of a prompt adds 0 to it, as in a call.
        if not rows:
            return total
        index = images.new_tensor(rows).long()
        scores = reward.score_with_gradient(images[index], [prompts[row] for row in rows])
        return total.index_add(0, index, weight * scores.to(total.dtype))

    def __call__(
        self,
        images: np.ndarray,
        prompts: Sequence[Prompt],
        latents: np.ndarray | None = None,
        sounds: Sounds | None = None,
    ) -> ScoreTable:
        """Score images, uint8 RGB [N, height, width, 3], or videos, [N, frames, height, width, 3],
        each against its prompt.

        Most rewards score images: a video's reward and metrics are means over ``FRAMES_SCORED``
        frames, each scored against the video's prompt, and a failed frame fails its video. Those
        that score whole videos get all frames. Where a reward compares, the images of a prompt are
        its whole group; of videos, frames of the same time are compared. A reward of some prompt
        sets sees the images of their prompts alone. ``latents``, float32 [N, ...], are for those
        that score latents; they see zeros in place of what is not finite. ``sounds`` are of the
        videos, for those that score videos with their sound.

        Raises:
            RewardError: images, prompts and latents do not match, or a reward breaks its contract.
        """
        asked, columns, reasons = self._score_each(
            self.all_rewards, images, prompts, latents, sounds
        )
        # The sum is NaN where a reward that was asked failed: one that is missing would make the
        # sample look worse or better than the others of its group. One that was not asked adds 0.
        trained = [
            np.where(asked[reward.name], weight * columns[reward.name], 0.0)
            for reward, weight in self.trained_rewards
        ]
        # [N]; a sum of no rewards would be 0, which is a number like any.
        unrewarded = ~np.any([asked[reward.name] for reward, _ in self.trained_rewards], axis=0)
        for row in np.flatnonzero(unrewarded).tolist():
            reasons[row] = f"no trained reward scores the prompt set {prompts[row].source!r}"
        total = np.where(unrewarded, np.nan, np.sum(trained, axis=0))
        return ScoreTable(total, columns, reasons)

    def score_pictures(
        self, images: np.ndarray, prompts: Sequence[Prompt], sounds: Sounds | None = None
    ) -> ScoreTable:
        """Score images or videos as a call does with the rewards and guardrails that need no
        latents; there is no sum, and the reward is NaN.

        Raises:
            RewardError: as in a call.
        """
        rewards = [reward for reward in self.all_rewards if reward.scores != "latents"]
        _, columns, reasons = self._score_each(rewards, images, prompts, None, sounds)
        return ScoreTable(np.full(len(images), np.nan), columns, reasons)

    def _score_each(
        self,
        rewards: Sequence[Reward],
        images: np.ndarray,
        prompts: Sequence[Prompt],
        latents: np.ndarray | None,
        sounds: Sounds | None,
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str | None]]:
        """Return which prompts each reward scores, bool [N], by its column; the columns of all of
        them, float64 [N]; and why samples failed.
        """
        check_images(images, prompts)
        asked = {reward.name: self._select_prompts(reward, prompts) for reward in rewards}
        columns: dict[str, np.ndarray] = {}
        reasons: list[list[str]] = [[] for _ in prompts]
        for reward in rewards:
            samples: Any = images  # in the form that the reward declares
            score = score_samples if images.ndim == 4 else score_videos
            if reward.scores == "latents":
                samples = replace_non_finite_latents(reward, latents, len(images))
                score = score_samples
            elif reward.scores == "sounds":
                samples = join_sounds(reward, images, sounds)
                score = score_samples
            if asked[reward.name].all():
                result = score(reward, samples, prompts)
            else:
                result = _score_rows(score, reward, samples, prompts, asked[reward.name])
            for column, values in {reward.name: result.values, **result.metrics}.items():
                # The table of a stage has these columns beside its own ``reward``, the weighted
                # sum.
                if column in columns or column == "reward":
                    raise RewardError(
                        f"the reward {reward.name!r} has a column {column!r} that exists already;"
                        " rename it"
                    )
                columns[column] = np.asarray(values, np.float64)
            # Where a reward was not asked its value is NaN as well, and no failure.
            for index in np.flatnonzero(np.isnan(result.values) & asked[reward.name]):
                reasons[index].append(f"{reward.name}: {get_failure_reason(result, int(index))}")
        return asked, columns, ["; ".join(parts) or None for parts in reasons]

    def _select_prompts(self, reward: Reward, prompts: Sequence[Prompt]) -> np.ndarray:
        """Return which prompts a reward scores, bool [N]."""
        config = self.of_sets.get(reward.name)
        return np.array(
            [config is None or config.applies_to(prompt.source) for prompt in prompts], np.bool_
        )


def _score_rows(
    score: Callable[[Reward, Any, Sequence[Prompt]], RewardResult],
    reward: Reward,
    images: Any,
    prompts: Sequence[Prompt],
    asked: np.ndarray,
) -> RewardResult:
    """Score the samples that are ``asked`` for, bool [N]; give the others NaN without a reason."""
    rows = np.flatnonzero(asked).tolist()
    if not rows:
        # What a reward makes of no image is not part of its contract.
        return RewardResult(np.full(len(images), np.nan))
    result = score(reward, images[rows], [prompts[row] for row in rows])
    return RewardResult(
        values=_scatter_rows(rows, result.values, len(images)),
        metrics={
            name: _scatter_rows(rows, values, len(images))
            for name, values in result.metrics.items()
        },
        failures={rows[index]: reason for index, reason in result.failures.items()},
    )


def _scatter_rows(rows: Sequence[int], values: np.ndarray, count: int) -> np.ndarray:
    """Return the values at their rows of ``count``; NaN elsewhere."""
    column = np.full(count, np.nan)
    column[rows] = values
    return column


def load_reward(config: RewardConfig) -> Reward:
    """Build the reward of a recipe, named as the column of its scores.

    Raises:
        RewardError: a user's own reward lacks a method, or rejects its options.
        RecipeError: nothing can be imported from its path.
    """
    reward: Reward
    if isinstance(config, CustomRewardConfig):
        reward = _build_custom_reward(config)
    else:
        reward = config.build()
    reward.name = config.column
    return reward


def _build_custom_reward(config: CustomRewardConfig) -> Reward:
    # Whatever goes wrong in the module itself is raised as it is, before any of the errors below.
    target = import_object(config.path)
    if isinstance(target, type):
        if not issubclass(target, Reward):
            raise RewardError(
                f"{config.path} is not a reward: derive it from ebbflow.rewards.base.Reward"
            )
        if isabstract(target):
            missing = ", ".join(sorted(target.__abstractmethods__))
            raise RewardError(f"{config.path} is not a whole reward: it lacks {missing}")
    try:
        if is_score_function(target):
            return FunctionReward(target, config.options)
        reward = config.build()
    except TypeError as error:
        raise RewardError(
            f"{config.path} rejects the options {', '.join(config.options)}: {error}"
        ) from error
    if not isinstance(reward, Reward):
        raise RewardError(
            f"{config.path} makes a {type(reward).__name__}, which is not a reward: derive it from"
            " ebbflow.rewards.base.Reward"
        )
    # Workers read what a reward scores from the path, before they build it: a function says
    # nothing, so what it makes must score images or videos.
    if reward.scores != config.scores and reward.scores != "videos":
        raise RewardError(
            f"{config.path} makes a reward of {reward.scores}; name the class with scores ="
            f" {reward.scores!r} itself"
        )
    return reward


def load_scorer(rewards: Sequence[RewardConfig], guardrails: Sequence[RewardConfig]) -> Scorer:
    """Build the scorer of a recipe. Guardrails that cannot run here are left out, with one warning.

    Raises:
        RewardError: a trained reward cannot run here, a user's own is not a reward, or a guardrail
            compares.
    """
    # A trained reward that is missing would change what the policy learns, so it stops the run. A
    # guardrail only watches: a run on a machine without tesseract is worth more than none.
    trained = [(load_reward(reward), reward.weight) for reward in rewards]
    for reward, _ in trained:
        reason = reward.explain_unavailable()
        if reason:
            raise RewardError(
                f"the reward {reward.name!r} is trained on and cannot run here: {reason}"
            )
    watched = [load_reward(guardrail) for guardrail in guardrails]
    compared = [guardrail.name for guardrail in watched if guardrail.compares]
    if compared:
        raise RewardError(GUARDRAIL_COMPARES.format(compared[0]))
    left_out: dict[str, str] = {}
    for guardrail in watched:
        # Asked once: the answer may need a request to a server.
        reason = guardrail.explain_unavailable()
        if reason:
            left_out[guardrail.name] = reason
    if left_out:
        listed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"guardrails left out of this run: {listed}", stacklevel=2)
    available = tuple(guardrail for guardrail in watched if guardrail.name not in left_out)
    of_sets = {config.column: config for config in (*rewards, *guardrails) if config.prompts}
    return Scorer(tuple(trained), available, left_out, of_sets)


def require_scored_share(table: ScoreTable, limit: float) -> None:
    """Stop when more than the share ``limit`` of the images has no reward (``max_failed_share``).

    Raises:
        RewardError: names the count, the share and the first reasons.
    """
    if table.failed_share <= limit:
        return
    failed_rows = np.flatnonzero(np.isnan(table.reward))
    # Three different reasons: hundreds of images usually fail for the same one.
    reasons = list(dict.fromkeys(str(table.failures[row]) for row in failed_rows))[:3]
    raise RewardError(
        f"{len(failed_rows)} of {len(table.reward)} images ({table.failed_share:.1%}) have no"
        f" reward, more than max_failed_share = {limit:.1%} allows; the first reasons:"
        f" {' | '.join(reasons)}"
    )
