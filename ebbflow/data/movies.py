"""A video with its sound as one MP4 file, which every player plays: PyAV encodes it, where it is
installed (``pip install 'ebbflow[movies]'``).
"""

from __future__ import annotations

import io
from fractions import Fraction
from importlib.util import find_spec

import numpy as np

from ebbflow.data.images import decode_pngs
from ebbflow.data.sounds import Sounds, read_sounds

MODULE = "av"
QUALITY = "18"
"""Constant rate factor of x264: 18 is where most people see no difference."""
SOUND_BITS = 192_000
"""Bits a second of the sound, in AAC."""


def can_encode_movies() -> bool:
    """Whether PyAV is installed."""
    return find_spec(MODULE) is not None


def convert_to_movie(png: bytes) -> bytes | None:
    """Convert a sample as it is stored and served, an animated PNG file with its sound, to an MP4
    file; None where it is no video or has no sound.

    Raises:
        SoundError: its sound cannot be read.
    """
    sounds = read_sounds([png])
    video = decode_pngs([png])[0]
    if sounds is None or video.ndim != 4:
        return None
    return encode_movie(video, sounds)


def encode_movie(video: np.ndarray, sounds: Sounds) -> bytes:
    """Encode a video and its sound as an MP4 file of H.264 and AAC; the same bytes each time.

    The sound lasts as long as the video, which gives the frame rate.

    Args:
        video: uint8 RGB [frames, height, width, 3], height and width even.
        sounds: of this one video, [1, samples, channels].
    """
    import av

    samples, channels = sounds.pcm.shape[1:]
    rate = Fraction(len(video) * sounds.rate, samples).limit_denominator(1000)
    buffer = io.BytesIO()
    with av.open(buffer, mode="w", format="mp4") as movie:
        pictures = movie.add_stream("libx264", rate=rate)
        pictures.height, pictures.width = video.shape[1:3]
        pictures.pix_fmt = "yuv420p"
        # One thread: several may cut the work elsewhere on another machine.
        pictures.options = {"crf": QUALITY, "threads": "1"}
        voice = movie.add_stream("aac", rate=sounds.rate)
        voice.bit_rate = SOUND_BITS
        voice.layout = "stereo" if channels == 2 else "mono"
        for frame in video:
            movie.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        movie.mux(pictures.encode(None))
        # Packed samples: (samples, channels) row by row, as av wants them in one row.
        packed = np.ascontiguousarray(sounds.pcm[0, :, : 2 if channels == 2 else 1]).reshape(1, -1)
        chunk = av.AudioFrame.from_ndarray(packed, format="s16", layout=voice.layout.name)
        chunk.sample_rate = sounds.rate
        chunk.pts = 0
        movie.mux(voice.encode(chunk))
        movie.mux(voice.encode(None))
    return buffer.getvalue()
