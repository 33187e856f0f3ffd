"""Waveforms on a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np

from ebbflow.data.sounds import Sounds
from ebbflow.plots.sounds import HEIGHT, NUM_BARS, draw_waveform, measure_loudness


def make_sound(samples):
    """Silence, and one full amplitude in the second channel at three quarters of the time."""
    pcm = np.zeros((1, samples, 2), np.int16)
    pcm[0, samples * 3 // 4, 1] = -32767
    return Sounds(pcm, 24000)


def test_loudness_is_the_largest_amplitude_of_each_span():
    loudness = measure_loudness(make_sound(2400), 8)
    assert loudness.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


def test_a_waveform_has_a_bar_for_each_span_and_says_its_seconds():
    svg = ET.fromstring(draw_waveform(make_sound(2400)))
    assert svg.get("aria-label") == "Waveform of 0.10 seconds, loudest 1.00"
    heights = [float(bar.split("v")[1]) for bar in svg[0].get("d").split(" ") if "v" in bar]
    assert len(heights) == NUM_BARS
    assert [index for index, height in enumerate(heights) if height > 1] == [NUM_BARS * 3 // 4]
    assert max(heights) == HEIGHT


def test_a_sound_of_few_samples_has_as_many_bars():
    assert len(measure_loudness(make_sound(5), NUM_BARS)) == 5
