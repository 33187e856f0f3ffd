"""Videos, with and without sound, between the client and the server of rewards, over HTTP."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from reward_cases import as_prompt
from served_cases import answering, says, serving
from test_reward_server import post

from ebbflow.data.images import encode_pngs
from ebbflow.data.sounds import Sounds, encode_wavs
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import server
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.built_in.audio_video_sync import AudioVideoSync
from ebbflow.rewards.built_in.jpeg import JpegCompressibility
from ebbflow.rewards.combine import Scorer
from ebbflow.rewards.samples import SoundedVideos

RNG = np.random.default_rng(0)
VIDEOS = RNG.integers(0, 256, (3, 9, 8, 12, 3), dtype=np.uint8)
SOUNDS = Sounds(RNG.integers(-9000, 9000, (3, 9 * 50, 2)).astype(np.int16), 1200)
SAMPLES = SoundedVideos(VIDEOS, SOUNDS)
PROMPTS = [as_prompt(index, "AB") for index in range(3)]


class Motion(Reward):
    """Mean change between frames; of videos without sound."""

    name = "motion"
    scores = "videos"

    def __call__(self, videos, prompts):
        return RewardResult(np.abs(np.diff(videos.astype(float), axis=1)).mean((1, 2, 3, 4)))


def make_remote(url, samples, **keys):
    return configure_reward("remote", url=url, samples=samples, batch=2, **keys).build()


def encode(files):
    return [base64.b64encode(file).decode() for file in files]


def make_body(images=None, sounds=None):
    body = {"images": encode(encode_pngs(VIDEOS) if images is None else images)}
    body["prompts"] = [{"prompt": "a bell"}] * len(body["images"])
    return body if sounds is None else body | {"sounds": sounds}


def test_a_server_hears_what_a_local_reward_hears():
    local = AudioVideoSync()
    expected = local(SAMPLES, PROMPTS).values
    with serving(local) as url:
        remote = make_remote(url, "sounds")
        assert remote.explain_unavailable() is None
        result = remote(SAMPLES, PROMPTS)
        # A scorer gives sound to remote rewards of it, as to those of this machine.
        table = Scorer(((remote, 1.0),))(VIDEOS, PROMPTS, None, SOUNDS)
    assert not result.failures
    assert result.values.tolist() == expected.tolist()
    assert table.reward.tolist() == expected.tolist()
    assert len(set(expected.tolist())) == 3


def test_a_server_sees_whole_videos():
    with serving(Motion()) as url:
        result = make_remote(url, "videos")(VIDEOS, PROMPTS)
    assert result.values.tolist() == Motion()(VIDEOS, PROMPTS).values.tolist()


def test_what_a_recipe_sends_and_what_the_server_scores_must_agree():
    with serving(AudioVideoSync()) as url:
        assert make_remote(url, "images").explain_unavailable() == (
            f"{url}: the reward audio_video_sync scores sounds, and the recipe sends images; set"
            " samples to sounds"
        )
    with serving(JpegCompressibility()) as url:
        reason = make_remote(url, "sounds").explain_unavailable()
        assert reason.endswith("scores images, and the recipe sends sounds; set samples to images")
    # Servers that were written for images do not say what they score.
    with answering(says({"reward": "old", "ready": True})) as old:
        assert make_remote(old.url, "images").explain_unavailable() is None


def test_the_request_of_sound_is_what_the_page_says():
    with answering(says({"scores": [1.0, 1.0]})) as asked:
        make_remote(asked.url, "sounds")(SAMPLES[:2], PROMPTS[:2])
    (request,) = asked.asked
    assert request.json.keys() == {"images", "prompts", "sounds"}
    assert request.json["images"] == encode(encode_pngs(VIDEOS[:2]))
    assert request.json["sounds"] == encode(encode_wavs(SOUNDS)[:2])


WAVS = encode(encode_wavs(SOUNDS))
REFUSED = {
    "no sounds": (make_body(), 422, "scores videos with sound; send a WAV of each"),
    "a sound too few": (make_body(sounds=WAVS[:2]), 422, "3 videos have 2 sounds"),
    "images": (
        make_body(encode_pngs(VIDEOS[:, 0]), WAVS),
        422,
        "images.0: this reward scores videos; send animated PNG files",
    ),
    "videos of two lengths": (
        make_body(encode_pngs(VIDEOS[:2]) + encode_pngs(VIDEOS[2:, :5]), WAVS),
        422,
        "must have one size and number of frames, got [(12, 8, 5), (12, 8, 9)]",
    ),
    "no WAV": (make_body(sounds=encode([b"OggS"] * 3)), 422, "sounds: one is no WAV file"),
    "no base64": (make_body(sounds=["%"] * 3), 422, "sounds: one is no base64"),
    "a video that ends early": (
        make_body([file[:-400] for file in encode_pngs(VIDEOS)], WAVS),
        422,
        "images.0 is a PNG file that ends early",
    ),
}


@pytest.fixture(scope="module")
def url():
    with serving(AudioVideoSync()) as address:
        yield address


@pytest.mark.parametrize(("body", "status", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_heard_is_refused_with_the_reason(url, body, status, reason):
    answer = post(url, body)
    assert answer[0] == status
    assert reason in answer[1]


def test_frames_that_a_header_claims_count_before_they_are_unpacked(url, monkeypatch):
    monkeypatch.setattr(server, "MAX_PIXELS", 3 * 9 * 8 * 12 - 1)
    status, reason = post(url, make_body(sounds=WAVS))
    assert status == 413
    assert "3 videos of 9 frames of 12x8 are more than" in reason


def test_a_reward_of_images_gets_no_sound():
    with serving(JpegCompressibility()) as images:
        sound = post(images, make_body(encode_pngs(VIDEOS[:, 0]), WAVS))
    assert sound == (422, "sounds are sent to a reward that scores images; leave them out")


def test_no_videos_are_no_scores(url):
    assert post(url, {"images": [], "prompts": [], "sounds": []})[1]["scores"] == []
