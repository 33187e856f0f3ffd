"""What a reward is: a deterministic function of images, groups, videos or latents, and their
prompts, to a number for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt

NO_TARGET = "the prompt names no text; quote it in the prompt or give a 'target' column"


class RewardError(RuntimeError):
    """Scoring must stop: a reward is missing or broken, or failed on too many samples."""


@dataclass(frozen=True)
class RewardResult:
    """Scores of N images.

    Attributes:
        values: float64 [N]; NaN where scoring failed.
        metrics: further float64 [N] columns from the same pass over the images, by name.
        failures: the reason for every NaN in ``values``, by index.
    """

    values: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class Reward(Protocol):
    """Scores images, uint8 RGB [N, height, width, 3]; larger is better."""

    name: str

    def unavailable(self) -> str | None:
        """Why the reward cannot run on this machine and how to fix it; None if it can."""

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult: ...


@runtime_checkable
class GroupReward(Protocol):
    """Compares the images of one prompt with each other; larger is better.

    Stages score whole groups, so they can train on it. An evaluation scores single images and
    leaves it out: inside a group, a win rate is one half on average, whatever the policy draws.
    """

    name: str

    def unavailable(self) -> str | None:
        """As of ``Reward``."""

    def compare(self, images: np.ndarray, prompt: Prompt) -> RewardResult:
        """Scores of the group of a prompt: at least two images, uint8 RGB [N, height, width, 3]."""


@runtime_checkable
class VideoReward(Protocol):
    """Scores whole videos, their motion too; larger is better. It cannot score images."""

    name: str

    def unavailable(self) -> str | None:
        """As of ``Reward``."""

    def score_videos(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Scores of videos, uint8 RGB [N, frames, height, width, 3], all frames in their order."""


@runtime_checkable
class LatentReward(Protocol):
    """Scores final latents, before they are decoded; larger is better. It is for one model family,
    whose latents it knows.
    """

    name: str

    def unavailable(self) -> str | None:
        """As of ``Reward``."""

    def score_latents(self, latents: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Scores of latents at sigma = 0, float32 [N, ...] as the family's network has them
        (``Model.latent_shape``).
        """


AnyReward: TypeAlias = Reward | GroupReward | VideoReward | LatentReward


@runtime_checkable
class DifferentiableReward(Reward, Protocol):
    """A reward that also gives its gradient with respect to the image: algorithms such as ReFL and
    DRaFT learn from that.
    """

    def with_gradient(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [N] with gradient of images, float32 RGB in [0, 1], [N, 3, height, width]; those
        of a call but for rounding.
        """


@runtime_checkable
class DifferentiableLatentReward(LatentReward, Protocol):
    """A reward of latents that also gives its gradient: nothing is decoded for it, with or without
    gradient.
    """

    def latents_with_gradient(self, latents: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [N] with gradient of latents, float32 [N, ...]; those of ``score_latents`` but for
        rounding.
        """


@runtime_checkable
class FeatureReward(Reward, Protocol):
    """A reward whose network also says what an image shows: an evaluation measures the diversity of
    samples with it.
    """

    def features(self, images: np.ndarray) -> np.ndarray:
        """Features, float32 [N, D], of images, uint8 RGB [N, height, width, 3]."""
