"""Rewards of videos with sound: what they get, and pairs whose scores are known."""

from __future__ import annotations

import numpy as np
import pytest
from network_cases import as_prompts

from ebbflow.data.images import encode_pngs
from ebbflow.data.sounds import SoundError, Sounds, attach_sounds, read_sounds
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe import Recipe
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.combine import Scorer, load_reward
from ebbflow.rewards.samples import SoundedVideos, join_sounds

FRAMES = 24
SEGMENT = 100
"""Samples of sound for each frame."""
RATE = 2400
EVENTS = [3, 8, 15]


def blink(events):
    """A video whose pictures change from dark to grey or back at some frames alone."""
    video = np.zeros((FRAMES, 4, 6, 3), np.uint8)
    for event in events:
        video[event:] = 100 - video[event:]
    return video


def click(events, seed=0):
    """A stereo sound that is silent but for one and the same burst in some segments."""
    wave = np.zeros((FRAMES, SEGMENT), np.int16)
    wave[events] = np.random.default_rng(seed).integers(-9000, 9000, SEGMENT)
    return np.repeat(wave.reshape(-1, 1), 2, axis=1)


def pair(pictures, sounds):
    """SoundedVideos of lists of events."""
    return SoundedVideos(
        np.stack([blink(events) for events in pictures]),
        Sounds(np.stack([click(events) for events in sounds]), RATE),
    )


def sync(samples):
    reward = load_reward(configure_reward("audio_video_sync"))
    return reward(samples, as_prompts(*["a bell"] * len(samples)))


def test_clicks_at_every_motion_and_nowhere_else_correlate_fully():
    assert sync(pair([EVENTS, EVENTS], [EVENTS, EVENTS])).values == pytest.approx([1, 1], abs=1e-9)


def test_clicks_where_nothing_moves_correlate_as_disjoint_events_do():
    """Two indicators of n of T points that never meet: r = -n / (T - n)."""
    late = [event + 1 for event in EVENTS]
    n, points = len(EVENTS), FRAMES - 1
    assert sync(pair([EVENTS], [late])).values == pytest.approx([-n / (points - n)], abs=1e-9)


def test_one_click_of_three_is_worth_what_the_indicators_say():
    points = FRAMES - 1
    motion = np.zeros(points)
    motion[np.array(EVENTS) - 1] = 1
    onset = np.zeros(points)
    onset[EVENTS[0] - 1] = 1
    expected = np.corrcoef(motion, onset)[0, 1]
    assert sync(pair([EVENTS], [EVENTS[:1]])).values == pytest.approx([expected], abs=1e-9)


def test_a_silent_or_still_video_scores_zero():
    assert sync(pair([EVENTS, []], [[], EVENTS])).values.tolist() == [0.0, 0.0]


def test_a_score_depends_on_its_own_video_alone():
    several = sync(pair([EVENTS, [2, 9], EVENTS], [[4], [2, 9], EVENTS])).values
    alone = [sync(pair([a], [b])).values[0] for a, b in ((EVENTS, [4]), ([2, 9], [2, 9]))]
    assert several[:2].tolist() == alone


def test_a_video_too_short_to_correlate_fails_with_a_reason():
    short = SoundedVideos(
        np.zeros((1, 2, 4, 4, 3), np.uint8), Sounds(np.zeros((1, 90, 1), "i2"), 9)
    )
    result = sync(short)
    assert np.isnan(result.values).all()
    assert "too few to correlate" in result.failures[0]


class Loudness(Reward):
    """Mean square of the sound; keeps what it was called with."""

    name = "loudness"
    scores = "sounds"

    def __init__(self):
        self.seen = []

    def __call__(self, samples, prompts):
        self.seen.append(samples)
        return RewardResult((samples.sounds.mono.astype(np.float64) ** 2).mean(1))


def test_a_scorer_gives_sound_with_its_video_to_rewards_that_hear():
    reward = Loudness()
    scorer = Scorer(((reward, 2.0),))
    assert scorer.reads_sounds
    assert not scorer.reads_latents
    samples = pair([[], []], [[], EVENTS])
    table = scorer(samples.videos, as_prompts("a", "b"), None, samples.sounds)
    assert table.reward[0] == 0 < table.reward[1]
    (seen,) = reward.seen
    assert (seen.sounds.rate, seen.frame_rate) == (RATE, RATE / SEGMENT)
    assert seen.videos.shape == samples.videos.shape
    pictures = scorer.score_pictures(samples.videos, as_prompts("a", "b"), samples.sounds)
    assert np.array_equal(pictures.metrics["loudness"], table.metrics["loudness"])


def test_a_reward_that_hears_needs_a_sound_for_each_video():
    samples = pair([EVENTS], [EVENTS])
    for images, sounds in ((samples.videos, None), (samples.videos[:, 0], samples.sounds)):
        with pytest.raises(RewardError, match=r"'loudness' scores videos with sound, .* \(ltx2\)"):
            join_sounds(Loudness(), images, sounds)
    with pytest.raises(RewardError, match="1 sounds for 2 videos"):
        join_sounds(Loudness(), np.repeat(samples.videos, 2, 0), samples.sounds)


def test_sounds_are_read_from_stored_samples():
    samples = pair([EVENTS, [5]], [EVENTS, [5]])
    pngs = encode_pngs(samples.videos)
    assert read_sounds(pngs) is None
    stored = attach_sounds(pngs, samples.sounds)
    again = read_sounds(stored)
    assert again.rate == RATE
    assert np.array_equal(again.pcm, samples.sounds.pcm)
    with pytest.raises(SoundError):
        read_sounds([stored[0], pngs[1]])


def test_a_recipe_rejects_a_reward_of_sound_for_a_family_without():
    recipe = {"prompts": {"source": "prompts.txt"}, "rewards": ["audio_video_sync"]}
    wan = {"family": "wan", "path": "models/wan", "frames": 9}
    message = "audio_video_sync scores sound, and model.family = 'wan' generates none; take ltx2"
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate(recipe | {"model": wan})
    ltx2 = {"family": "ltx2", "path": "models/ltx2"}
    with pytest.raises(RecipeError, match="model.frames = 1"):
        Recipe.model_validate(recipe | {"model": ltx2})
    Recipe.model_validate(recipe | {"model": ltx2 | {"frames": 9}})
