"""Rewards of videos with sound: what they get, and pairs whose scores are known."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from network_cases import as_prompts
from transformers import AutoTokenizer, ClapConfig, ClapFeatureExtractor, ClapModel

from benchmarks.tiny_models.tokenizers import build_qwen_tokenizer
from ebbflow.data.images import encode_pngs
from ebbflow.data.sounds import SoundError, Sounds, attach_sounds, read_sounds
from ebbflow.online.monitor import build_validation_requests
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.recipe import Recipe
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardError, RewardResult
from ebbflow.rewards.built_in.clap import resample
from ebbflow.rewards.combine import Scorer, load_reward
from ebbflow.rewards.samples import SoundedVideos, join_sounds
from ebbflow.stage import StageContext

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


CLAP_RATE = 8000
SECOND = 1


@pytest.fixture(scope="module")
def clap_folder(tmp_path_factory):
    """A tiny CLAP that hears one second. Never write into it."""
    folder = tmp_path_factory.mktemp("clap")
    torch.manual_seed(0)
    tokenizer = build_qwen_tokenizer()
    config = ClapConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "pad_token_id": 1,  # as RoBERTa has it; positions count from there
        },
        audio_config={
            "spec_size": 64,
            "num_mel_bins": 16,
            "patch_size": 4,
            "patch_stride": [4, 4],
            "window_size": 4,
            "depths": [1, 1],
            "num_attention_heads": [2, 2],
            "hidden_size": 64,
            "patch_embeds_hidden_size": 32,
            "num_classes": 4,
        },
        projection_dim=16,
    )
    ClapModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=CLAP_RATE,
        hop_length=160,
        max_length_s=SECOND,
        fft_window_size=256,
        frequency_max=4000,
        truncation="rand_trunc",
    ).save_pretrained(folder)
    return folder


def tones(rate, frequencies, seconds=SECOND):
    time = np.arange(round(rate * seconds)) / rate
    waves = np.stack([np.sin(2 * np.pi * frequency * time) for frequency in frequencies])
    pcm = (8000 * waves[..., None]).round().astype(np.int16)
    return SoundedVideos(np.zeros((len(pcm), 3, 4, 4, 3), np.uint8), Sounds(pcm, rate))


def clap(folder, samples, texts):
    reward = load_reward(configure_reward("clap", path=str(folder), batch=2))
    return reward(samples, as_prompts(*texts)).values


@torch.no_grad()
def test_clap_is_the_cosine_of_transformers_own_network(clap_folder):
    samples = tones(CLAP_RATE, [200, 900, 2500])
    texts = ["a bell", "rain on a tin roof", ""]
    network = ClapModel.from_pretrained(clap_folder).eval()
    extractor = ClapFeatureExtractor.from_pretrained(clap_folder)
    tokenizer = AutoTokenizer.from_pretrained(clap_folder)
    expected = []
    for wave, text in zip(samples.sounds.mono, texts, strict=True):
        sound = extractor(wave, sampling_rate=CLAP_RATE, return_tensors="pt")
        output = network(**tokenizer(text or " ", return_tensors="pt"), **sound)
        expected.append(torch.cosine_similarity(output.text_embeds, output.audio_embeds).item())
    values = clap(clap_folder, samples, [text or " " for text in texts])
    assert np.ptp(values) > 1e-3
    assert values == pytest.approx(expected, abs=1e-5)


def test_clap_hears_the_beginning_of_a_long_sound_and_always_the_same(clap_folder):
    long = tones(CLAP_RATE, [200, 900], seconds=3)
    texts = ["a bell", "rain"]
    first, again = (clap(clap_folder, long, texts) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert first == pytest.approx(clap(clap_folder, tones(CLAP_RATE, [200, 900]), texts), abs=1e-6)


@pytest.mark.parametrize(("rate", "target"), [(24000, 48000), (48000, 16000), (8000, 8000)])
def test_a_tone_is_the_same_at_another_rate(rate, target):
    wave, expected = (
        np.sin(2 * np.pi * 440 * np.arange(each) / each)[None].astype(np.float32)
        for each in (rate, target)
    )
    assert np.abs(resample(wave, rate, target) - expected).max() < 1e-5


def test_a_tone_above_what_the_rate_can_hold_is_silent():
    wave = np.sin(2 * np.pi * 9000 * np.arange(24000) / 24000)[None].astype(np.float32)
    assert np.abs(resample(wave, 24000, 16000)).max() < 1e-5


@pytest.mark.parametrize(
    ("guardrails", "rewards", "training", "validation"),
    [
        ([], ["jpeg_compressibility"], False, False),
        ([f"{__name__}:Loudness"], ["jpeg_compressibility"], False, True),
        ([], [f"{__name__}:Loudness"], True, True),
    ],
    ids=["nothing hears", "a guardrail hears", "a reward hears"],
)
def test_sound_is_decoded_where_something_scores_it(
    make_recipe, make_prompts, guardrails, rewards, training, validation
):
    """Guardrails are scored in validations alone."""
    ctx = StageContext(make_recipe(online={}, rewards=rewards, guardrails=guardrails), 0, 0)
    sampler = PromptSampler(ctx, make_prompts(9))
    queue = RolloutQueue(ctx, SimpleNamespace(steps_before=0), sampler, MagicMock(), None)
    requests = asyncio.run(queue.build_requests(0))
    assert {request.with_sound for request in requests} == {training}
    (request,) = build_validation_requests(ctx, make_prompts(2), lambda batch: None, version=0)
    assert request.with_sound == validation
