"""Sound as PCM and as WAV files."""

from __future__ import annotations

import numpy as np
import pytest

from ebbflow.data.images import decode_pngs, encode_pngs, is_animated
from ebbflow.data.sounds import (
    SoundError,
    Sounds,
    attach_sounds,
    decode_wavs,
    encode_pcm,
    encode_wavs,
    read_sound,
)

RNG = np.random.default_rng(0)
SOUNDS = Sounds(RNG.integers(-32767, 32768, (3, 500, 2)).astype(np.int16), 24000)


def test_wav_files_keep_every_sample():
    read = decode_wavs(encode_wavs(SOUNDS))
    assert read.rate == 24000
    assert read.pcm.dtype == np.int16
    assert np.array_equal(read.pcm, SOUNDS.pcm)


def test_amplitudes_are_rounded_to_16_bits_and_clipped():
    waves = np.array([[[0.0, 0.5, 1.0, 3.0, -3.0, np.nan, 1 / 32767]]])
    pcm = encode_pcm(waves)
    assert pcm.shape == (1, 7, 1)
    assert pcm[0, :, 0].tolist() == [0, 16384, 32767, 32767, -32767, 0, 1]
    assert np.abs(Sounds(pcm, 8).waves[0, :3, 0] - waves[0, 0, :3]).max() < 1 / 32767


def test_mono_is_the_mean_of_the_channels():
    assert np.allclose(Sounds(np.array([[[32767, 0], [0, 0]]], np.int16), 8).mono, [[0.5, 0]])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([b"RIFF"], "is no WAV file that can be read"),
        ([b""], "is no WAV file that can be read"),
        ([encode_wavs(SOUNDS)[0][:-1]], "is no WAV file that can be read"),
        (encode_wavs(Sounds(SOUNDS.pcm[:1, :0], 24000)), "has no samples"),
        (
            encode_wavs(SOUNDS) + encode_wavs(Sounds(SOUNDS.pcm, 48000)),
            "have several rates, lengths or channels",
        ),
    ],
)
def test_files_that_are_no_equal_sounds_are_refused(files, message):
    with pytest.raises(SoundError, match=message):
        decode_wavs(files)


@pytest.mark.parametrize("shape", [(3, 8, 12, 3), (3, 5, 8, 12, 3)], ids=["images", "videos"])
def test_a_png_holds_the_sound_and_the_same_pixels(shape):
    pictures = RNG.integers(0, 256, shape, dtype=np.uint8)
    silent = encode_pngs(pictures)
    pngs = attach_sounds(silent, SOUNDS)
    assert np.array_equal(decode_pngs(pngs), pictures)
    assert [is_animated(png) for png in pngs] == [len(shape) == 5] * 3
    assert np.array_equal(decode_wavs([read_sound(png) for png in pngs]).pcm, SOUNDS.pcm)
    assert [read_sound(png) for png in silent] == [None] * 3
    assert attach_sounds(silent, None) == silent
