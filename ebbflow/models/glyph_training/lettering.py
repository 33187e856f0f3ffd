"""Renders text as pixels: training images of the glyph model, and what the ``similarity`` reward
compares with.

Bold DejaVu Sans Mono, which matplotlib carries, laid out by Pillow's own engine: the same bytes
wherever the same Pillow runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import ceil, floor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MARGIN = 1
"""White pixels kept on every side of a clean rendering."""
MIN_SIZE = 5.0
"""Font size in pixels below which nobody could read the letters."""
ADVANCE = 0.602
"""Width of every letter of the font, in font sizes."""


def render_text(text: str, height: int, width: int) -> np.ndarray:
    """One centred line of dark (0) letters on white (255), as large as fits: uint8 [height, width].

    Runs of white space count as one blank; a text of nothing else gives a white image.

    Raises:
        ValueError: the text does not fit legibly, or the font lacks one of its letters.
    """
    text = " ".join(text.split())
    if not text:
        return np.full((height, width), 255, np.uint8)
    return _render_line(text, _find_largest_size(text, height, width), (0.0, 0.0), height, width)


def render_batch(
    texts: Sequence[str], height: int, width: int, rng: np.random.Generator
) -> np.ndarray:
    """Renderings for training: uint8 [N, height, width], ``render_text`` with size jittered by 5 %
    and position by a pixel.

    Positions fall on whole pixels and sizes on quarters. Every text takes three draws from ``rng``.
    No letter is cut off.

    Raises:
        ValueError: as ``render_text``.
    """
    # All random numbers first, three for each text: whether a text is empty or how large it is must
    # not shift those of the texts after it.
    scale = rng.uniform(0.95, 1.05, len(texts))
    shift = rng.uniform(-1, 1, (len(texts), 2))
    images = np.full((len(texts), height, width), 255, np.uint8)
    for index, text in enumerate(" ".join(text.split()) for text in texts):
        if text:
            size = _round_to_quarter(_find_largest_size(text, height, width) * scale[index])
            images[index] = _render_line(text, size, tuple(shift[index]), height, width)
    return images


def render_letter(letter: str, size: float) -> np.ndarray:
    """One letter at a font size, dark (0) on white (255), cut to its ink: uint8 [height, width]."""
    font = _load_font(_round_to_quarter(size))
    # "ls": around the origin at the left end of the baseline, so that left and top may be negative.
    left, top, right, bottom = font.getbbox(letter, anchor="ls")
    image = Image.new("L", (ceil(right) - floor(left), ceil(bottom) - floor(top)), 255)
    ImageDraw.Draw(image).text((-floor(left), -floor(top)), letter, fill=0, font=font, anchor="ls")
    return np.asarray(image)


def find_fitting_size(text: str, height: int, width: int) -> float:
    """The font size, in pixels, at which ``render_text`` draws a text.

    Raises:
        ValueError: as ``render_text``.
    """
    return _find_largest_size(" ".join(text.split()), height, width)


def _render_line(
    text: str, size: float, shift: tuple[float, float], height: int, width: int
) -> np.ndarray:
    left, top, right, bottom = _text_ink_box(text, size)
    x = _centre_origin(left, right, width, shift[0])
    y = _centre_origin(top, bottom, height, shift[1])
    image = Image.new("L", (width, height), 255)
    ImageDraw.Draw(image).text((x, y), text, fill=0, font=_load_font(size), anchor="ls")
    return np.asarray(image)


def _centre_origin(low: float, high: float, length: int, shift: float) -> float:
    """Where the origin goes so that [low, high] sits in the middle of ``length``, off by ``shift``
    as far as there is room.
    """
    room = max(0.0, (length - (high - low)) / 2)
    return (length - low - high) / 2 + min(max(shift, -room), room)


@lru_cache(maxsize=1 << 16)
def _find_largest_size(text: str, height: int, width: int) -> float:
    _check_letters(text)
    # From the largest size that is narrow enough, down to one that is low enough. The height of the
    # ink depends on the letters, and has no formula.
    size = _find_widest_size(len(text), width)
    while size >= MIN_SIZE:
        _, top, _, bottom = _text_ink_box(text, size)
        if bottom - top <= height - 2 * MARGIN:
            return size
        size -= 0.25
    raise ValueError(
        f"{text!r} cannot be read in an image of {height}x{width} pixels; take shorter texts or"
        " larger images"
    )


@cache
def _find_widest_size(letters: int, width: int) -> float:
    # The font is monospaced, so that the number of letters is all that matters. They advance by
    # whole pixels, so a size may fit that is up to half a pixel a letter above the exact quotient.
    size = _round_to_quarter(((width - 2 * MARGIN) / letters + 0.5) / ADVANCE)
    while size >= MIN_SIZE and letters * _load_font(size).getlength("M") > width - 2 * MARGIN:
        size -= 0.25
    return size


def _text_ink_box(text: str, size: float) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a text around its origin on the baseline; letter by letter, since
    letters are few.
    """
    boxes = [_letter_ink_box(letter, size) for letter in text]
    return (
        0.0,
        min(top for top, _, _ in boxes),
        sum(advance for _, _, advance in boxes),
        max(bottom for _, bottom, _ in boxes),
    )


@lru_cache(maxsize=1 << 16)
def _letter_ink_box(letter: str, size: float) -> tuple[float, float, float]:
    font = _load_font(size)
    _, top, _, bottom = font.getbbox(letter, anchor="ls")
    return top, bottom, font.getlength(letter)


def _round_to_quarter(size: float) -> float:
    return round(size * 4) / 4


@lru_cache(maxsize=256)
def _load_font(size: float) -> ImageFont.FreeTypeFont:
    # Pillow's own layout: raqm, which not every machine has, would place letters otherwise.
    return ImageFont.truetype(_font_path(), size, layout_engine=ImageFont.Layout.BASIC)


def _check_letters(text: str) -> None:
    missing_letters = sorted(set(text) - _font_letters())
    if missing_letters:
        raise ValueError(
            f"the font has no {missing_letters[0]!r}, asked for in {text!r}; it knows Latin, Greek"
            " and Cyrillic letters"
        )


@cache
def _font_letters() -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(_font_path()).get_charmap()))


@cache
def _font_path() -> str:
    import matplotlib  # only the glyph family needs it, and its folder also loads without

    return str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSansMono-Bold.ttf"))
