"""Sample grids: many captioned images on one sheet, large enough to read."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageFont

PICTURED = 16
"""Samples per grid: the same prompts with the same noise in every evaluation."""
MARGIN = 8
CAPTION_SIZE = 13
MIN_WIDTH = 128
"""Narrower images are enlarged by a whole factor, pixel by pixel."""
MAX_WIDTH = 256
MAX_SHARP_WIDTH = 96
"""Pictures up to this width are embedded pixel by pixel, larger ones as JPEGs."""
PAPER = "#ffffff"
INK = "#30343b"


def build_image_grid(pngs: Sequence[bytes], captions: Sequence[str], columns: int) -> Image.Image:
    """Build a sheet of images in reading order with a caption under each; small ones are enlarged,
    large ones reduced.

    Args:
        pngs: encoded images, at least one; sizes may differ. Of a video the first frame is shown.
        captions: one per image; what does not fit is cut with an ellipsis.
        columns: images per row.

    Raises:
        ValueError: no images, not one caption per image, or no columns.
    """
    if not pngs or len(pngs) != len(captions) or columns < 1:
        raise ValueError(
            f"got {len(pngs)} images, {len(captions)} captions and {columns} columns; pass a"
            " caption per image"
        )
    images = [fit_width(open_rgb_image(png), MIN_WIDTH, MAX_WIDTH) for png in pngs]
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    cell_width = max(image.width for image in images) + MARGIN
    cell_height = max(image.height for image in images) + MARGIN + CAPTION_SIZE + 6
    # Cells are as large as the largest image: a table of prompts may have several sizes.
    sheet = Image.new("RGB", (columns * cell_width + MARGIN, rows * cell_height + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, (image, text) in enumerate(zip(images, captions, strict=True)):
        left = MARGIN + index % columns * cell_width
        top = MARGIN + index // columns * cell_height
        sheet.paste(image, (left, top))
        below = (left, cell_height + top - MARGIN - CAPTION_SIZE - 6)
        draw.text(below, _cut_to_width(text, cell_width - MARGIN), fill=INK, font=_load_font())
    return sheet


def format_caption(sample: Mapping[str, Any]) -> str:
    """Write the caption of a sample: its ``target``, or else its ``prompt``, and its ``reward``
    (None if it was not scored).
    """
    score = "not scored" if sample["reward"] is None else f"{sample['reward']:.2f}"
    return f"{sample['target'] or sample['prompt']} {score}"


def open_rgb_image(png: bytes) -> Image.Image:
    """Decode an image; of a video its first frame."""
    return Image.open(io.BytesIO(png)).convert("RGB")


def fit_width(image: Image.Image, min_width: int, max_width: int) -> Image.Image:
    """Enlarge by a whole factor to at least ``min_width``, or reduce to at most ``max_width``; in
    between leave it as it is.
    """
    if image.width < min_width:
        # Nearest neighbour at a whole factor: every pixel of the sample stays a square.
        factor = -(-min_width // image.width)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if image.width > max_width:
        return image.resize(
            (max_width, max(1, round(image.height * max_width / image.width))),
            Image.Resampling.LANCZOS,
        )
    return image


def encode_data_uri(
    image: Image.Image, sharp: bool, max_width: int = 2 * MAX_SHARP_WIDTH, quality: int = 80
) -> str:
    """Encode a picture as a URI inside a page: pixel by pixel, or as a JPEG of at most
    ``max_width`` pixels.
    """
    buffer = io.BytesIO()
    if sharp:
        image.save(buffer, "PNG", optimize=True)
    else:
        fit_width(image, 1, max_width).save(buffer, "JPEG", quality=quality)
    kind = "png" if sharp else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


@cache
def _load_font() -> ImageFont.FreeTypeFont:
    # matplotlib ships this font, so captions look the same on every machine. It takes a second to
    # import, and stages that draw no grid need not wait.
    from matplotlib import font_manager

    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), CAPTION_SIZE)


def _cut_to_width(text: str, width: int) -> str:
    # A prompt may have line breaks, which would run into the image below.
    text = " ".join(text.split())
    if _load_font().getlength(text) <= width:
        return text
    while text and _load_font().getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
