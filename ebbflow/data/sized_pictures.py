"""Captioned pictures in the sizes that they are trained in, and a line about a whole data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from ebbflow.data.buckets import (
    BucketSize,
    choose_bucket,
    fit_picture,
    is_smaller,
    list_bucket_sizes,
)
from ebbflow.data.captioned import (
    CaptionedPicture,
    DataError,
    list_unlisted_files,
    read_captioned,
)
from ebbflow.data.twins import normalize_text
from ebbflow.progress import show_progress
from ebbflow.recipe.data import DataConfig

TOO_SMALL = "smaller than their size"
TOO_SHORT = "too short, or no videos"
EVALUATED = "on prompts of the evaluation"
UNLISTED = "files without a row"
MODEL_SIZE = "in the size of the model"


def read_in_size(
    picture: CaptionedPicture, config: DataConfig, frames: int, sizes: Sequence[BucketSize]
) -> np.ndarray | str:
    """Read a picture, scaled and cropped to the size of its bucket, or return why it is left out.

    Args:
        frames: of a model of videos; 1 for images.

    Raises:
        DataError: it cannot be read.
    """
    pixels = picture.read(frames, config.frames_per_second)
    if pixels is None:
        return TOO_SHORT
    height, width = pixels.shape[-3:-1]
    size = choose_bucket(height, width, sizes)
    return TOO_SMALL if is_smaller(height, width, size) else fit_picture(pixels, size)


def describe_data(
    config: DataConfig, source: Path, frames: int, size: BucketSize | None, evaluated: Set[str]
) -> str:
    """Read every picture, and describe in a line how many there are, in which sizes, and what is
    left out.

    Example:
        >>> describe_data(DataConfig(path="photos"), Path("photos"), 1, (512, 512), {"a cat"})
        "812 pictures of photos: 812 of 512x512; left out: 3 on prompts of the evaluation"

    Args:
        frames: as of ``read_in_size``.
        size: of the model's pictures; None where only the loaded model knows it.
        evaluated: captions that no training may see, in whatever case and punctuation
            (``twins.normalize_text``).

    Raises:
        DataError: the data, a row or a picture cannot be used, or none is left.
    """
    counts = Counter[str]()
    left_out = Counter[str]()
    sizes = list_bucket_sizes(size, config.buckets) if size else []
    normalized = set(map(normalize_text, evaluated))
    for picture in show_progress(f"reading {source.name}", "picture", read_captioned(source)):
        if sizes:
            pixels = read_in_size(picture, config, frames, sizes)
        else:
            pixels = picture.read(frames, config.frames_per_second)
            if pixels is None:
                pixels = TOO_SHORT
        if normalize_text(picture.caption) in normalized:
            left_out[EVALUATED] += 1
        elif isinstance(pixels, str):
            left_out[pixels] += 1
        else:
            counts[f"of {format_sizes([pixels.shape[-3:-1]])}" if sizes else MODEL_SIZE] += 1
    left_out += Counter({UNLISTED: len(list_unlisted_files(source))})
    if not counts:
        raise DataError(
            f"{source}: no picture is left to train on: {_format_counts(left_out)}; add others, or"
            " change the model's size"
        )
    described = f"{counts.total()} pictures of {source.name}: {_format_counts(counts)}"
    return f"{described}; left out: {_format_counts(left_out) or 'none'}"


def format_sizes(sizes: Sequence[BucketSize]) -> str:
    """Write sizes as width x height."""
    return ", ".join(f"{width}x{height}" for height, width in sizes)


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
