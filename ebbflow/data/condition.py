"""Condition images: the pictures to edit that a prompt file names or holds."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from ebbflow.data.images import encode_png
from ebbflow.recipe.base import printable

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_PIXELS = 64_000_000
"""A file of kilobytes can unpack to an image that fills memory."""


class ConditionError(ValueError):
    """A condition image that cannot be used: what is wrong with the value, and the way out."""


def condition_image(value: str | bytes, folder: Path) -> bytes:
    """The PNG, RGB without metadata, of an encoded image or of an image file in ``folder`` or below.

    The pixels are those of diffusers' ``load_image``: turned as EXIF says, without alpha; the first of an animation.

    Args:
        value: bytes of a PNG, JPEG or WebP file, or the path of one, relative to ``folder`` or absolute.

    Raises:
        ConditionError: there is no such image, it cannot be read or is too large, or its file lies outside the folder.
    """
    source = io.BytesIO(value) if isinstance(value, bytes) else _inside(value, folder)
    try:
        with Image.open(source, formats=FORMATS) as image:
            check_picture(image)
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except (ConditionError, Image.DecompressionBombError) as error:
        raise ConditionError(f"is no image to work on: {error}") from None
    except Exception as error:  # of many kinds: every decoder of Pillow has its own
        raise ConditionError(
            f"is no PNG, JPEG or WebP image that can be read ({printable(str(error), 200)}); write it again"
        ) from None
    return encode_png(np.asarray(upright)[None])[0]


def check_picture(image: Image.Image) -> None:
    """Check that an image can be decoded in bounded memory and turned into 8-bit RGB without loss.

    Raises:
        ConditionError: it cannot.
    """
    if image.width * image.height > MOST_PIXELS:
        raise ConditionError(f"{image.width} x {image.height} are more than {MOST_PIXELS:,} pixels; make it smaller")
    if image.mode.startswith("I"):
        raise ConditionError("its greys have 16 bits, which would be cut off at the lowest 8; write it with 8 bits")


def _inside(value: str, folder: Path) -> Path:
    """The file that a path leads to, through all links: a file from someone else must not read what lies elsewhere."""
    root = os.path.realpath(folder)
    try:
        path = Path(os.path.realpath(os.path.join(root, value)))
        there = path.is_file()
    except (OSError, ValueError) as error:
        raise ConditionError(f"is no path that can be followed ({error}); correct it") from None
    if not path.is_relative_to(root):
        raise ConditionError("lies outside the folder of the prompt file; keep images in that folder or below it")
    if not there:
        raise ConditionError(
            f"is no image file in {folder}. Paths are relative to the prompt file; of prompts at a URI only the file itself is "
            "fetched: put the bytes of the images into Parquet there"
        )
    return path
