"""Images as PNG, videos as animated PNG, and back; lossless, so a score never depends on whether a sample was stored."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import count
from struct import pack

import numpy as np
from PIL import Image, ImageSequence
from PIL.PngImagePlugin import getchunks, putchunk

FRAMES_PER_SECOND = 16
"""How fast a stored video is played; nothing else depends on it."""
VIDEO_COMPRESSION = 1
"""zlib's fastest level: a sixth more bytes than the usual one for a sixth of its seconds, and a video has many frames."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_png(pictures: np.ndarray) -> list[bytes]:
    """PNG bytes of uint8 RGB images [N, height, width, 3], animated ones of videos [N, frames, height, width, 3]."""
    encode = _encode_video if pictures.ndim == 5 else _encode
    return [encode(picture) for picture in pictures]


def _encode(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def _encode_video(video: np.ndarray) -> bytes:
    """Animated PNG (PNG Specification, Third Edition) with every frame whole.

    Pillow's own writer would make one longer frame of equal neighbours, and no animation of a single frame.
    """
    height, width = video.shape[1:3]
    buffer, numbers = io.BytesIO(), count()
    buffer.write(PNG_SIGNATURE)
    for index, frame in enumerate(video):
        chunks = getchunks(Image.fromarray(frame), compress_level=VIDEO_COMPRESSION)
        if index == 0:
            putchunk(buffer, b"IHDR", chunks[0][1])
            putchunk(buffer, b"acTL", pack(">2I", len(video), 0))  # played without end
        # Number, size, offset, seconds as a fraction; the frame replaces the one before.
        putchunk(buffer, b"fcTL", pack(">5I2H2B", next(numbers), width, height, 0, 0, 1, FRAMES_PER_SECOND, 0, 0))
        pixels = b"".join(data for name, data, _ in chunks if name == b"IDAT")
        if index == 0:
            putchunk(buffer, b"IDAT", pixels)  # a still to what knows no animations
        else:
            putchunk(buffer, b"fdAT", pack(">I", next(numbers)), pixels)
    putchunk(buffer, b"IEND")
    return buffer.getvalue()


def decode_png(pictures: Sequence[bytes]) -> np.ndarray:
    """uint8 RGB [N, height, width, 3] of PNG images of one size, [N, frames, height, width, 3] of animated ones."""
    return np.stack([_decode(picture) for picture in pictures])


def _decode(picture: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(picture)) as image:
        if "loop" in image.info:  # only animations say how often they are played
            return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
        return np.asarray(image.convert("RGB"))
