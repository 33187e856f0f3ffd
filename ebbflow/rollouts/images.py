"""Images as PNG bytes and back; lossless, so a score never depends on whether an image was stored."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image


def encode_png(images: np.ndarray) -> list[bytes]:
    """PNG bytes of uint8 RGB images [N, height, width, 3]."""
    return [_encode(image) for image in images]


def _encode(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def decode_png(images: Sequence[bytes]) -> np.ndarray:
    """uint8 RGB [N, height, width, 3] of PNG images of one size."""
    return np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images])
