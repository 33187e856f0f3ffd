"""Sounds on a page: a waveform, and a player."""

from __future__ import annotations

import base64

import numpy as np
from markupsafe import Markup

from ebbflow.data.sounds import Sounds

NUM_BARS = 120
HEIGHT = 40
MIN_BAR = 1.0
"""Of silence, so that it is a line and not a gap."""


def draw_waveform(sounds: Sounds) -> Markup:
    """Draw the waveform of the first sound as SVG: a bar for each of at most ``NUM_BARS`` spans of
    time, as high as its largest amplitude.
    """
    loudness = measure_loudness(sounds, NUM_BARS)
    bars = [
        f"M{index + 0.5} {HEIGHT / 2 - height / 2:.1f}v{height:.1f}"
        for index, height in enumerate(np.maximum(loudness * HEIGHT, MIN_BAR))
    ]
    seconds = sounds.pcm.shape[1] / sounds.rate
    return Markup(
        '<svg class="waveform" viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
        ' role="img" aria-label="Waveform of {seconds} seconds, loudest {loudest}">'
        '<path d="{path}" stroke="currentColor" stroke-width="0.7"/></svg>'
    ).format(
        width=len(loudness),
        height=HEIGHT,
        seconds=f"{seconds:.2f}",
        loudest=f"{loudness.max():.2f}",
        path=" ".join(bars),
    )


def measure_loudness(sounds: Sounds, num_spans: int) -> np.ndarray:
    """Measure the largest amplitude of the first sound in each span of time, in [0, 1]; fewer spans
    where there are fewer samples.
    """
    amplitude = np.abs(sounds.waves[0]).max(axis=1)
    spans = np.array_split(amplitude, min(num_spans, len(amplitude)))
    return np.array([span.max() for span in spans])


def encode_wav_uri(wav: bytes) -> str:
    """Encode a WAV file as a data URI."""
    return f"data:audio/wav;base64,{base64.b64encode(wav).decode()}"
