"""Aspect-ratio buckets: which size a picture is trained in, and how it is scaled and cropped to it.

As in the bucketing of NovelAI's trainer: sizes are multiples of a step, and none has more pixels
than the model's own size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from ebbflow.recipe.data import BucketsConfig

BucketSize = tuple[int, int]
"""Height and width, in pixels."""


def list_bucket_sizes(size: BucketSize, config: BucketsConfig | None) -> list[BucketSize]:
    """List the sizes of buckets, by ascending width; without ``config`` the model's own alone.

    For each side that is a multiple of ``step``, the other is the largest multiple with at most as
    many pixels as ``size``; both orientations are there.

    Example:
        >>> list_bucket_sizes((512, 512), BucketsConfig(step=128, max_aspect_ratio=2))
        [(640, 384), (512, 512), (384, 640)]

    Args:
        size: that of the model, always one of them.
    """
    if config is None:
        return [size]
    area = size[0] * size[1]
    sizes = {size}
    longest = math.floor(math.sqrt(area * config.max_aspect_ratio))
    for side in range(config.step, longest + 1, config.step):
        other = min(area // side, longest) // config.step * config.step
        if other and max(other / side, side / other) <= config.max_aspect_ratio:
            sizes |= {(other, side), (side, other)}
    return sorted(sizes, key=lambda bucket: (bucket[1], bucket[0]))


def choose_bucket(height: int, width: int, sizes: Sequence[BucketSize]) -> BucketSize:
    """Choose the size with the nearest aspect ratio, as a factor; of equally near ones the
    largest.
    """
    ratio = math.log(width / height)
    return min(
        sizes,
        key=lambda size: (round(abs(math.log(size[1] / size[0]) - ratio), 9), -size[0] * size[1]),
    )


def is_smaller(height: int, width: int, size: BucketSize) -> bool:
    """Return whether a picture would have to be enlarged to cover a size."""
    return height < size[0] or width < size[1]


def fit_picture(picture: np.ndarray, size: BucketSize) -> np.ndarray:
    """Scale an image or a video so that it just covers a size, and crop what stands out on both
    sides.

    Args:
        picture: uint8 RGB [height, width, 3] or [frames, height, width, 3].

    Returns:
        uint8 RGB of that size, [height, width, 3] or [frames, height, width, 3].
    """
    if picture.ndim == 4:
        return np.stack([fit_picture(frame, size) for frame in picture])
    height, width = picture.shape[:2]
    if (height, width) == size:
        return picture
    scale = max(size[0] / height, size[1] / width)
    # The part of the picture that the size shows, in its own pixels: Pillow scales it from there,
    # so that no rounded size comes between.
    shown_height = size[0] / scale
    shown_width = size[1] / scale
    top = (height - shown_height) / 2
    left = (width - shown_width) / 2
    box = (left, top, left + shown_width, top + shown_height)
    image = Image.fromarray(picture)
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.LANCZOS, box=box))
