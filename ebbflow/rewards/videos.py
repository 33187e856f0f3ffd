"""Score videos: whole ones where the reward declares ``scores = "videos"``, else some of their
frames as images, whose mean is the score of the video.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ebbflow.data.prompts import Prompt
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.groups import get_failure_reason, score_samples

FRAMES_SCORED = 8
"""Frames of a video that are scored, evenly spaced from the first to the last; all frames of a
shorter video.
"""


def select_scored_frames(count: int) -> np.ndarray:
    """Return the indices of the scored frames of a video of ``count`` frames, ascending and
    distinct.
    """
    return np.linspace(0, count - 1, min(count, FRAMES_SCORED)).round().astype(int)


def score_videos(reward: Reward, videos: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
    """Score videos, uint8 RGB [N, frames, height, width, 3], each against its prompt.

    Raises:
        RewardError: the reward breaks its contract.
    """
    if reward.scores == "videos":
        return score_samples(reward, videos, prompts)
    frames = select_scored_frames(videos.shape[1])
    if reward.compares:
        # One call for each point in time, so that the first frame of a video is compared with the
        # first frames of the prompt's other videos and never with its own second frame.
        result = _interleave_frames(
            [score_samples(reward, videos[:, frame], prompts) for frame in frames]
        )
    else:
        # (N, F, H, W, 3) -> (N * F, H, W, 3): one call, so that the reward forms its own batches.
        images = videos[:, frames].reshape(-1, *videos.shape[2:])
        result = score_samples(reward, images, [prompt for prompt in prompts for _ in frames])
    return RewardResult(
        values=_average_frames(result.values, len(frames)),
        metrics={
            name: _average_frames(values, len(frames)) for name, values in result.metrics.items()
        },
        failures=_explain_failed_videos(result, frames),
    )


def _interleave_frames(parts: Sequence[RewardResult]) -> RewardResult:
    """Put results of the first frames of all videos, of their second ones and so on into one
    result in the order of one call: all frames of the first video, then those of the second.
    """
    return RewardResult(
        values=np.stack([part.values for part in parts], 1).ravel(),
        metrics={
            name: np.stack([part.metrics[name] for part in parts], 1).ravel()
            for name in parts[0].metrics
        },
        failures={
            video * len(parts) + frame: reason
            for frame, part in enumerate(parts)
            for video, reason in part.failures.items()
        },
    )


def _average_frames(values: np.ndarray, frames: int) -> np.ndarray:
    """Return the mean over the frames of each video, [N * frames] -> [N]; NaN where one is NaN."""
    # mean, not nanmean: a frame that cannot be scored may be the broken one, and its video must
    # not gain by it.
    means: np.ndarray = np.asarray(values, np.float64).reshape(-1, frames).mean(axis=1)
    return means


def _explain_failed_videos(result: RewardResult, frames: np.ndarray) -> dict[int, str]:
    """Return, for each failed video, the reason of its first failed frame and how many more
    failed.
    """
    reasons: dict[int, str] = {}
    for video, failed in enumerate(np.isnan(result.values).reshape(-1, len(frames))):
        if not failed.any():
            continue
        first = int(failed.argmax())
        others = ""
        if failed.sum() > 1:
            others = f" (and {failed.sum() - 1} more of {len(frames)} frames)"
        reason = get_failure_reason(result, video * len(frames) + first)
        # The number of the frame in the video, not among the scored ones: a person looks it up.
        reasons[video] = f"frame {frames[first]}: {reason}{others}"
    return reasons
