"""MP4 files of videos with sound, where PyAV is installed."""

from __future__ import annotations

import io

import numpy as np
import pytest

from ebbflow.data import movies
from ebbflow.data.images import encode_pngs
from ebbflow.data.sounds import Sounds, attach_sounds
from ebbflow.registry import drawing

RATE = 24000
FRAMES = 25
TONE = 440


def sample() -> tuple[np.ndarray, Sounds]:
    """25 plain frames of another colour each, and a tone as long as 25 frames of 24 a second."""
    colours = np.random.default_rng(0).integers(0, 256, (FRAMES, 1, 1, 3), dtype=np.uint8)
    time = np.arange(RATE * FRAMES // 24) / RATE
    wave = (8000 * np.sin(2 * np.pi * TONE * time)).astype(np.int16)
    return colours.repeat(64, 1).repeat(96, 2), Sounds(np.stack([wave, wave], 1)[None], RATE)


def test_a_movie_has_the_frames_and_the_sound_of_the_sample():
    av = pytest.importorskip("av")
    video, sounds = sample()
    (png,) = attach_sounds(encode_pngs(video[None]), sounds)
    movie = movies.convert_to_movie(png)
    assert movie == movies.convert_to_movie(png)
    with av.open(io.BytesIO(movie)) as file:
        assert file.streams.video[0].average_rate == 24
        assert file.streams.audio[0].rate == RATE
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert frames.shape == video.shape
    # A few of 256 levels are lost to 4:2:0 and the rounding of colours.
    assert np.abs(frames.astype(int) - video).mean() < 4
    with av.open(io.BytesIO(movie)) as file:
        heard = np.concatenate([chunk.to_ndarray() for chunk in file.decode(audio=0)], 1)[0]
    inside = heard[RATE // 8 : RATE * 7 // 8]
    peak = np.abs(np.fft.rfft(inside)).argmax() * RATE / len(inside)
    assert abs(peak - TONE) <= RATE / len(inside)


def test_a_picture_and_a_silent_video_are_no_movie():
    video, sounds = sample()
    (silent,) = encode_pngs(video[None])
    (still,) = attach_sounds(encode_pngs(video[:1]), sounds)
    assert movies.convert_to_movie(silent) is None
    assert movies.convert_to_movie(still) is None


def test_a_movie_is_drawn_beside_its_picture_only_where_it_can_be(tmp_path, monkeypatch):
    video, sounds = sample()
    (png,) = attach_sounds(encode_pngs(video[None]), sounds)
    for installed, expected in ((False, {"bell.png", "bell.wav"}), (True, {"bell.mp4"})):
        monkeypatch.setattr(drawing, "can_encode_movies", lambda answer=installed: answer)
        monkeypatch.setattr(drawing, "convert_to_movie", lambda png: b"movie")
        drawing._write_picture(tmp_path, "bell", png)
        assert {path.name for path in tmp_path.iterdir()} >= expected
        assert (tmp_path / "bell.mp4").exists() == installed
