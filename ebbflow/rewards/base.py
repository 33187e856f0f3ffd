"""Define what a reward is: a deterministic function from samples and their prompts to one number
for each sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, get_args

from ebbflow.recipe.rewards import Scored

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt

NO_TARGET = "the prompt names no text; quote it in the prompt or give a 'target' column"


class RewardError(RuntimeError):
    """Scoring must stop: a reward is missing or broken, or failed on too many samples."""


@dataclass(frozen=True)
class RewardResult:
    """Scores of N samples.

    Attributes:
        values: float64 [N]; NaN where scoring failed.
        metrics: further float64 [N] columns from the same pass over the samples, by name.
        failures: the reason for every NaN in ``values``, by index.

    Example:
        Three images, of which the second could not be scored::

            RewardResult(
                values=np.array([0.8, np.nan, 0.1]),
                metrics={"brightness": np.array([0.5, 0.9, 0.2])},
                failures={1: "no face in the image"},
            )
    """

    values: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class Reward(ABC):
    """Score samples against their prompts; larger is better.

    A subclass declares what it can do in class attributes, and a call has the same form for all:
    samples and as many prompts. A score depends on nothing but what the call gets, and is
    reproducible.

    Attributes:
        name: the column of its scores; a run sets it.
        scores: what ``samples`` are.

            - ``images``: uint8 RGB [N, height, width, 3]. Of a video it gets frames.
            - ``pairs``: two images of one prompt, uint8 RGB [N, 2, height, width, 3]. A value is
              the probability that the first one is better; an image's score is its win rate.
            - ``groups``: all images of ONE prompt, at least two, uint8 RGB [N, height, width, 3];
              ``prompts`` repeats the prompt.
            - ``videos``: whole videos, uint8 RGB [N, frames, height, width, 3].
            - ``sounds``: whole videos with their sound, an
              ``ebbflow.rewards.samples.SoundedVideos``: ``videos`` as above, ``sounds.mono``, the
              waveforms in float32 [N, samples], and ``sounds.rate``, samples a second.
            - ``latents``: final latents at sigma = 0 before they are decoded, float32 [N, ...], as
              the network of one model family has them (``Model.latent_shape``).

            Rewards of pairs and groups are trained on, and an evaluation ignores them: a win rate
            is one half on average, whatever the policy generates.
        has_gradient: whether ``score_with_gradient`` exists, from which ReFL, DRaFT and SRPO learn.
        has_features: whether ``compute_features`` exists, by which an evaluation measures how
            diverse samples are.
        network_bytes: memory of its network's weights, for ``ebbflow estimate``; 0 without a
            network. None: unknown, and the estimate says that it does not count it.
        gradient_bytes: memory that ``score_with_gradient`` keeps of one image until the backward
            pass, in the same way.

    Example:
        A reward for bright images, whose gradient an algorithm can use::

            class Brightness(Reward):
                has_gradient = True

                def __call__(self, images, prompts):
                    return RewardResult(images.mean((1, 2, 3)) / 255)

                def score_with_gradient(self, images, prompts):
                    return images.mean((1, 2, 3))

    Raises:
        TypeError: a class declares an ability without its method, or has the method of an ability
            that it does not declare.
    """

    name: str = ""
    scores: ClassVar[Scored] = "images"
    has_gradient: ClassVar[bool] = False
    has_features: ClassVar[bool] = False
    network_bytes: ClassVar[int | None] = None
    gradient_bytes: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        # Runs when a class is defined, so that a mistake fails at the import and not in a worker.
        super().__init_subclass__()
        if cls.scores not in get_args(Scored):
            known = ", ".join(get_args(Scored))
            raise TypeError(f"{cls.__name__}.scores = {cls.scores!r}; take one of {known}")
        # Who reads a run's set-up asks the declaration alone, so it must not differ from the code.
        for declaration, method in (
            ("has_gradient", "score_with_gradient"),
            ("has_features", "compute_features"),
        ):
            is_defined = getattr(cls, method) is not getattr(Reward, method)
            if getattr(cls, declaration) and not is_defined:
                raise TypeError(f"{cls.__name__} has {declaration} = True; define {method}")
            if is_defined and not getattr(cls, declaration):
                raise TypeError(f"{cls.__name__} defines {method}; declare {declaration} = True")

    @property
    def compares(self) -> bool:
        """Whether a score depends on the other images of the prompt."""
        return self.scores in ("pairs", "groups")

    def explain_unavailable(self) -> str | None:
        """Return why the reward cannot run on this machine and how to fix that; None if it can."""
        return None

    @abstractmethod
    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        """Score N samples, whose form ``scores`` declares, against their N prompts."""

    def score_with_gradient(self, samples: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Return the scores [N] of a call, but for rounding, with gradient.

        Args:
            samples: float32: RGB in [0, 1], [N, 3, height, width]; or latents [N, ...] where
                ``scores`` is ``latents``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def compute_features(self, images: np.ndarray) -> np.ndarray:
        """Return features, float32 [N, D], of images, uint8 RGB [N, height, width, 3]."""
        raise NotImplementedError(f"{type(self).__name__} has no features")
