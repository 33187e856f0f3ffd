"""Sample grids: many small pictures on one, large enough to read."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

PICTURED = 16
"""Samples in a grid: the same prompts with the same noise at every evaluation."""
MARGIN = 8
CAPTION_SIZE = 13
SMALLEST_WIDTH = 128
"""Narrower pictures are enlarged by a whole factor, pixel for pixel."""
LARGEST_WIDTH = 256
PAPER, INK = "#ffffff", "#30343b"


def image_grid(pngs: Sequence[bytes], captions: Sequence[str], columns: int) -> Image.Image:
    """Pictures in reading order with a caption under each; small ones are enlarged, large ones reduced.

    Args:
        pngs: encoded pictures, at least one; they may differ in size. Of a video the first frame is shown.
        captions: one per picture; what does not fit is cut with an ellipsis.
        columns: pictures per row.
    """
    if not pngs or len(pngs) != len(captions) or columns < 1:
        raise ValueError(f"a grid needs pictures, one caption each and a column, got {len(pngs)}, {len(captions)} and {columns}")
    pictures = [fit(open_rgb(png), SMALLEST_WIDTH, LARGEST_WIDTH) for png in pngs]
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    cell_width = max(picture.width for picture in pictures) + MARGIN
    cell_height = max(picture.height for picture in pictures) + MARGIN + CAPTION_SIZE + 6
    sheet = Image.new("RGB", (columns * cell_width + MARGIN, rows * cell_height + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = MARGIN + index % columns * cell_width, MARGIN + index // columns * cell_height
        sheet.paste(picture, (left, top))
        place = (left, cell_height + top - MARGIN - CAPTION_SIZE - 6)
        draw.text(place, _cut(caption, cell_width - MARGIN), fill=INK, font=_font())
    return sheet


def caption(sample: Mapping[str, Any]) -> str:
    """Of a sample: what it should show, ``target`` or ``prompt``, and its ``reward``, None where it was not scored."""
    score = "not scored" if sample["reward"] is None else f"{sample['reward']:.2f}"
    return f"{sample['target'] or sample['prompt']} {score}"


def open_rgb(png: bytes) -> Image.Image:
    """Decode a picture; of a video its first frame."""
    return Image.open(io.BytesIO(png)).convert("RGB")


def fit(picture: Image.Image, smallest: int, largest: int) -> Image.Image:
    """Enlarge by a whole factor up to at least ``smallest`` wide, or reduce to at most ``largest``; in between as it is."""
    if picture.width < smallest:
        factor = -(-smallest // picture.width)
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    if picture.width > largest:
        return picture.resize((largest, max(1, round(picture.height * largest / picture.width))), Image.Resampling.LANCZOS)
    return picture


@cache
def _font() -> ImageFont.FreeTypeFont:
    # matplotlib carries this font, so that captions look the same on every machine
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), CAPTION_SIZE)


def _cut(caption: str, width: int) -> str:
    text = " ".join(caption.split())
    if _font().getlength(text) <= width:
        return text
    while text and _font().getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
