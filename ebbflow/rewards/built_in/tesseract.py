"""``tesseract``: a second, unrelated reader. As a guardrail it shows when a policy has learned to
please ``ocr`` alone.

All images travel as pages of one TIFF through one process, because starting tesseract costs ten
times as much as reading a line. Each page is read as a single line by itself, so the score of an
image does not depend on its neighbours.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

from ebbflow.extras import explain_missing
from ebbflow.recipe.rewards import OcrRewardConfig
from ebbflow.rewards.base import Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from ebbflow.data.prompts import Prompt

COMMAND = ("tesseract", "stdin", "stdout", "-l", "eng", "--psm", "7", "tsv")
PAGES = 64
"""Pages per process: what is lost when one fails."""
TIMEOUT = 60.0
"""Seconds for one process; a page takes about 10 ms."""
READABLE_HEIGHT = 64
"""Images are enlarged to this height in pixels; tesseract misreads letters under 20."""
MARGIN = 20
"""White pixels around a page."""
PAGE_LEVEL = "1"
WORD_LEVEL = "5"


class TesseractConfig(OcrRewardConfig):
    """The same distance, as tesseract reads: an independent second OCR, 0 to 1."""

    name: Literal["tesseract"] = "tesseract"

    def build(self) -> Reward:
        return Tesseract(self)


class Tesseract(Reward):
    """Similarity of what tesseract reads to the prompt's target; ``tesseract_exact`` is 1 where
    they are equal.
    """

    name = "tesseract"

    def __init__(self, config: TesseractConfig | None = None) -> None:
        self.config = config or TesseractConfig()

    def explain_unavailable(self) -> str | None:
        # What tesseract reads is compared with the target by rapidfuzz.
        return _explain_unavailable() or explain_missing("it", "rapidfuzz")

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        from ebbflow.rewards.text import score_readings

        readings: list[str | None] = []
        failures: dict[int, str] = {}
        for start in range(0, len(images), PAGES):
            chunk = images[start : start + PAGES]
            texts, reason = read_lines_of_text(chunk)
            failures |= {start + index: reason for index, text in enumerate(texts) if text is None}
            readings += texts
        return score_readings(
            readings, prompts, "tesseract_exact", failures, self.config.match, self.config.case
        )


def read_lines_of_text(images: np.ndarray) -> tuple[list[str | None], str]:
    """Read the line of text in each image, "" where there is none, None where tesseract gave no
    page; and why it did not.

    Args:
        images: uint8 RGB [N, height, width, 3], one line each, dark on light.
    """
    no_texts: list[str | None] = [None for _ in images]
    try:
        process = subprocess.run(
            COMMAND,
            input=_encode_pages(images),
            # Its threads cost more than they save on one line, and would take the policy's cores.
            env={**os.environ, "OMP_THREAD_LIMIT": "1"},
            capture_output=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return no_texts, f"tesseract took more than {TIMEOUT:g} s for {len(images)} images"
    except OSError as error:
        return no_texts, f"tesseract did not start: {error}"
    # Whatever it ended with: pages that it read before it failed are scored.
    complaint = " ".join(process.stderr.decode(errors="replace").split())[-200:]
    texts = join_words_of_pages(process.stdout.decode(errors="replace"), len(images))
    return texts, f"tesseract ended with {process.returncode}: {complaint}"


def join_words_of_pages(tsv: str, pages: int) -> list[str | None]:
    """Return the words of each page, joined by blanks; None for a page that the table does not
    mention.

    Words of confidence 0 are left out: tesseract invents one for a page without text.
    """
    words: dict[int, list[str]] = {}
    for line in tsv.splitlines()[1:]:  # after the names of the columns
        level, page, *_, confidence, text = line.split("\t")
        if level == PAGE_LEVEL:
            words[int(page)] = []
        elif level == WORD_LEVEL and float(confidence) > 0:
            words[int(page)].append(text)
    return [" ".join(words[page]) if page in words else None for page in range(1, pages + 1)]


def _encode_pages(images: np.ndarray) -> bytes:
    from PIL import Image

    pages = [_build_page(Image.fromarray(image)) for image in images]
    stream = io.BytesIO()
    pages[0].save(stream, "TIFF", save_all=True, append_images=pages[1:])
    return stream.getvalue()


def _build_page(image: Image.Image) -> Image.Image:
    from PIL import Image

    scale = max(1.0, READABLE_HEIGHT / image.height)
    size = round(image.width * scale), round(image.height * scale)
    page = Image.new("L", (size[0] + 2 * MARGIN, size[1] + 2 * MARGIN), 255)
    page.paste(image.convert("L").resize(size, Image.Resampling.BICUBIC), (MARGIN, MARGIN))
    return page


@cache
def _explain_unavailable() -> str | None:
    install = (
        "install it with 'apt-get install tesseract-ocr', 'dnf install tesseract' or 'brew install"
        " tesseract'"
    )
    if shutil.which("tesseract") is None:
        return f"no tesseract on the PATH; {install}"
    try:
        listed = subprocess.run(
            ["tesseract", "--list-langs"], capture_output=True, text=True, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"tesseract does not run ({error}); {install}"
    if "eng" not in listed.stdout.split():
        return (
            "tesseract has no English data; install it with 'apt-get install tesseract-ocr-eng' or"
            " set TESSDATA_PREFIX"
        )
    return None
