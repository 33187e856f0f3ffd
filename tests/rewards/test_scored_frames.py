"""How a scorer scores videos: frame by frame, or whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import IMAGES, PROMPTS, Fixed, Watched, as_videos

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import (
    RewardError,
    Scorer,
    load_reward,
    load_scorer,
    require_scored_share,
)
from ebbflow.rewards.videos import FRAMES_SCORED, select_scored_frames


def test_a_videos_score_is_the_mean_over_its_frames():
    greys = np.array([[1, 5, 9], [10, 10, 40]])
    watched = Watched()
    other = Fixed("other", [0, 0, 3, 1, 1, 1])
    table = Scorer(((watched, 2.0), (other, 3.0)), ())(as_videos(greys), PROMPTS[:2])
    assert table.metrics["grey"] == pytest.approx([5, 20])
    assert table.metrics["squared"] == pytest.approx([107 / 3, 1800 / 3])
    assert table.reward == pytest.approx([2 * 5 + 3 * 1, 2 * 20 + 3 * 1])
    assert table.failures == [None, None]
    assert watched.prompts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert np.array_equal(watched.images, as_videos(greys).reshape(6, 4, 6, 3))


def test_of_a_long_video_evenly_spaced_frames_are_scored():
    greys = np.arange(1, 82) + np.zeros((2, 1), int)
    watched = Watched()
    table = Scorer(((watched, 1.0),))(as_videos(greys), PROMPTS[:2])
    shown = watched.images[:, 0, 0, 0].reshape(2, FRAMES_SCORED)
    assert shown[0].tolist() == shown[1].tolist() == [1, 12, 24, 35, 47, 58, 70, 81]
    assert table.reward == pytest.approx([41, 41])


@given(st.integers(1, 400))
def test_scored_frames_are_each_once_and_evenly_spaced(count):
    shown = select_scored_frames(count)
    assert len(shown) == min(count, FRAMES_SCORED)
    assert (shown[0], shown[-1]) == (0, count - 1)
    steps = np.diff(shown)
    assert steps.min(initial=1) >= 1
    assert steps.max(initial=1) - steps.min(initial=steps.max(initial=1)) <= 1


def test_a_video_of_one_frame_scores_as_its_image():
    images = as_videos([[3], [200], [0]])
    still, moving = (
        Scorer(((Watched(), 1.0),))(pictures, PROMPTS) for pictures in (images[:, 0], images)
    )
    assert np.array_equal(still.reward, moving.reward, equal_nan=True)
    assert moving.failures == [None, None, f"grey: frame 0: black, {PROMPTS[2].prompt}"]


def test_a_frame_that_failed_fails_its_video_and_is_named():
    greys = np.full((3, 15), 9)
    greys[1, 4] = 0  # the third of the frames 0, 2, 4, ... 14
    greys[2, [4, 14]] = 0
    greys[0, 3] = 0  # not looked at
    table = Scorer(((Watched(), 1.0),), (Fixed("guardrail", np.arange(24.0)),))(
        as_videos(greys), PROMPTS
    )
    text = f"black, {PROMPTS[1].prompt}"
    assert np.array_equal(table.reward, [9, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(table.metrics["squared"], [81, np.nan, np.nan], equal_nan=True)
    assert table.metrics["guardrail"] == pytest.approx([3.5, 11.5, 19.5])
    assert table.failures == [
        None,
        f"grey: frame 4: {text}",
        f"grey: frame 4: {text} (and 1 more of 8 frames)",
    ]
    require_scored_share(table, limit=0.67)
    with pytest.raises(RewardError, match=r"2 of 3 images .*frame 4: black"):
        require_scored_share(table, limit=0.66)


def test_no_videos_are_no_failure():
    table = Scorer(((Watched(), 1.0),))(as_videos([[1, 2]])[:0], [])
    assert table.reward.shape == table.metrics["squared"].shape == (0,)
    assert table.failures == []


def test_real_rewards_score_a_still_video_as_its_image(clean):
    images, prompts = (part[:3] for part in clean)
    scorer = load_scorer(
        [configure_reward("ocr")],
        [configure_reward("similarity"), configure_reward("jpeg_compressibility")],
    )
    still = scorer(images, prompts)
    moving = scorer(np.repeat(images[:, None], 3, axis=1), prompts)
    assert list(moving.metrics) == list(still.metrics)
    for name, values in still.metrics.items():
        assert moving.metrics[name] == pytest.approx(values)


class Motion(Reward):
    """Mean change from frame to frame; a still video is a failure."""

    scores = "videos"

    def __init__(self):
        self.shapes = []

    def __call__(self, videos, prompts):
        self.shapes.append(videos.shape)
        values = np.abs(np.diff(videos.astype(float), axis=1)).mean((1, 2, 3, 4))
        still = np.flatnonzero(values == 0)
        values[still] = np.nan
        return RewardResult(
            values, {"fastest": values * 2}, {int(index): "nothing moves" for index in still}
        )


def test_a_reward_of_videos_gets_all_frames_beside_one_of_frames():
    made = load_reward(configure_reward(f"{__name__}:Motion", label="motion"))
    greys = 1 + np.arange(20) * np.array([[1], [3], [0]])
    table = Scorer(((made, 1.0), (Watched(), 2.0)))(as_videos(greys), PROMPTS)
    assert made.shapes == [(3, 20, 4, 6, 3)]
    assert table.metrics["fastest"][:2].tolist() == [2.0, 6.0]
    assert table.reward[:2] == pytest.approx([1, 3] + 2 * table.metrics["grey"][:2])
    assert table.failures == [None, None, "motion: nothing moves"]
    with pytest.raises(
        RewardError,
        match="'motion' scores videos and got images; set model.frames, or leave it out",
    ):
        Scorer(((made, 1.0),))(IMAGES, PROMPTS)
