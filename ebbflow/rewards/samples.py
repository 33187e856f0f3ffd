"""What a reward gets: pictures, final latents, or videos with their sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbflow.data.sounds import Sounds
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardError


@dataclass(frozen=True)
class SoundedVideos:
    """N videos with their sounds, of rewards with ``scores = "sounds"``.

    Example:
        Two videos of LTX-2 with 25 frames: ``videos`` [2, 25, 512, 768, 3], ``sounds.mono`` [2,
        24960] with ``sounds.rate`` = 24000, and ``frame_rate`` = 24.04.

    Attributes:
        videos: uint8 RGB [N, frames, height, width, 3].
        sounds: of the videos, each as long as its video.
    """

    videos: np.ndarray
    sounds: Sounds

    @property
    def frame_rate(self) -> float:
        """Frames a second, as the sound lasts as long as the video."""
        frames: int = self.videos.shape[1]
        samples: int = self.sounds.pcm.shape[1]
        return frames * self.sounds.rate / samples

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, rows: slice | np.ndarray | list[int]) -> SoundedVideos:
        return SoundedVideos(self.videos[rows], self.sounds.select_rows(rows))


def join_sounds(reward: Reward, images: np.ndarray, sounds: Sounds | None) -> SoundedVideos:
    """Return videos, [N, frames, height, width, 3], with their sounds.

    Raises:
        RewardError: there is no sound, or not one for each video.
    """
    if sounds is None or images.ndim != 5:
        raise RewardError(
            f"the reward {reward.name!r} scores videos with sound, and these samples are"
            f" {'images' if images.ndim == 4 else 'videos without one'}; set model.family to one"
            " with sound (ltx2) and stages.engine to diffusers, or leave the reward out"
        )
    if len(sounds) != len(images):
        raise RewardError(f"{len(sounds)} sounds for {len(images)} videos")
    return SoundedVideos(images, sounds)


def replace_non_finite_latents(
    reward: Reward, latents: np.ndarray | None, count: int
) -> np.ndarray:
    """Return the latents of ``count`` samples in float32, with zeros for what is not finite.

    Raises:
        RewardError: there are none, or not as many.
    """
    if latents is None or len(latents) != count:
        available = "none" if latents is None else len(latents)
        raise RewardError(
            f"the reward {reward.name!r} scores latents, and there are {available} of {count}"
            " samples"
        )
    # One NaN may spread through the batch of a network, to the scores of other samples. The caller
    # fails these rows (``ScoreTable.fail_broken_latents``), whatever the reward says about zeros.
    return np.nan_to_num(latents.astype(np.float32), posinf=0.0, neginf=0.0)


def reads_any(rewards: Sequence[Reward | RewardConfig], kind: str) -> bool:
    """Return whether one of the rewards scores ``kind`` (``Reward.scores``)."""
    return any(reward.scores == kind for reward in rewards)
