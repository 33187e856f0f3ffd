r"""``audio_video_sync``: whether the sound of a video begins where its pictures move.

The sound is cut into as many segments as the video has frames, F. For the frames t = 1 ... F - 1

    m_t = mean |I_t - I_(t-1)|                        motion: over pixels and colours
    o_t = mean_k max(0, S_t[k] - S_(t-1)[k])          onset strength: the spectral flux
    S_t = log(1 + 100 |X_t|),   X_t the spectrum of segment t under a Hann window

and the score is the Pearson correlation of m and o, in [-1, 1]. The flux is the half-wave rectified
one of Bello et al., "A Tutorial on Onset Detection in Music Signals" (IEEE Transactions on Speech
and Audio Processing 13(5), 2005), with a logarithm, as loudness is heard. AV-Align (2309.16429)
compares onsets with the peaks of the optical flow; a correlation needs no threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from ebbflow.recipe.rewards import RewardConfig, Scored
from ebbflow.rewards.base import Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt
    from ebbflow.rewards.samples import SoundedVideos

LOUDNESS = 100.0
"""Spectra in units of a full amplitude are far below 1, where a logarithm would be linear."""
NO_SPREAD = 1e-9
"""A curve that varies less is flat: a still video, or silence."""
MIN_FRAMES = 3
"""Two differences of frames: fewer have no correlation."""
MIN_SAMPLES = 2
"""Of a segment of sound: fewer have no spectrum beside their mean."""


class AudioVideoSyncConfig(RewardConfig):
    """Correlation of the onsets of the sound with the motion of the pictures, -1 to 1."""

    known_lowest: ClassVar[float | None] = -1.0
    name: Literal["audio_video_sync"] = "audio_video_sync"

    @property
    def scores(self) -> Scored:
        return "sounds"

    @property
    def ignores_prompt(self) -> bool:
        return True

    def build(self) -> Reward:
        return AudioVideoSync()


class AudioVideoSync(Reward):
    """The Pearson correlation of onset strength and motion, 0 where a video is still or silent."""

    name = "audio_video_sync"
    scores = "sounds"

    def __call__(self, samples: SoundedVideos, prompts: Sequence[Prompt]) -> RewardResult:  # type: ignore[override]
        import numpy as np

        frames = samples.videos.shape[1]
        length = samples.sounds.pcm.shape[1] // frames
        if frames < MIN_FRAMES or length < MIN_SAMPLES:
            reason = f"{frames} frames with {length} samples of sound each are too few to correlate"
            failures = dict.fromkeys(range(len(samples)), reason)
            return RewardResult(np.full(len(samples), np.nan), failures=failures)
        # One video at a time: the differences of all frames of a batch take gigabytes.
        values = [
            correlate(measure_motion(video), measure_onsets(wave, frames))
            for video, wave in zip(samples.videos, samples.sounds.mono, strict=True)
        ]
        return RewardResult(np.array(values, np.float64))


def measure_motion(video: np.ndarray) -> np.ndarray:
    """Measure the mean change of each frame of a video, uint8 [F, height, width, 3], from the one
    before: float64 [F - 1] in 0 to 1.
    """
    import numpy as np

    changes = [
        np.abs(after.astype(np.int16) - before).mean() / 255
        for before, after in zip(video[:-1], video[1:], strict=True)
    ]
    return np.array(changes, np.float64)


def measure_onsets(wave: np.ndarray, frames: int) -> np.ndarray:
    """Measure how strongly the sound of each frame begins, the spectral flux of a waveform,
    float32 [samples]: float64 [F - 1].
    """
    import numpy as np

    # What is left over at the end, less than a sample for each frame, is not heard.
    length = len(wave) // frames
    segments = wave[: length * frames].reshape(frames, length).astype(np.float64)
    spectra = np.abs(np.fft.rfft(segments * np.hanning(length), axis=1)) / length
    loudness = np.log1p(LOUDNESS * spectra)  # (F, K)
    flux: np.ndarray = np.maximum(0, np.diff(loudness, axis=0)).mean(axis=1)
    return flux


def correlate(first: np.ndarray, second: np.ndarray) -> float:
    """Compute the Pearson correlation of two curves, [T] each; 0 where one of them is flat."""
    import numpy as np

    # Without a spread there is nothing to hear in time: neither good nor bad, and no failure,
    # which would let a policy that has fallen silent go unpunished.
    spread = float(first.std() * second.std())
    if min(first.std(), second.std()) < NO_SPREAD:
        return 0.0
    covariance = float(np.mean((first - first.mean()) * (second - second.mean())))
    return min(1.0, max(-1.0, covariance / spread))
