"""``ocr``: a neural reader, the PP-OCR models that rapidocr's wheel carries
(``ebbflow.rewards.ppocr``).

Of the layout ``line`` the recogniser is run directly: the image is one line already, so rapidocr's
detector and its per-image calls would only cost time. Of the layout ``page`` rapidocr finds the
pieces of text and reads each. Nothing is downloaded and the alphabet is not given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ebbflow.recipe.rewards import OcrRewardConfig
from ebbflow.rewards.base import Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt


class OcrConfig(OcrRewardConfig):
    """1 - edit distance / length between what PP-OCR reads and the prompt's target text, 0 to 1."""

    name: Literal["ocr"] = "ocr"
    layout: Literal["line", "page"] = "line"
    """``line``: the image is one line of text. ``page``: lines are detected first, as photographs
    and posters need.
    """

    def build(self) -> Reward:
        return Ocr(self)


class Ocr(Reward):
    """Similarity of what PP-OCR reads to the prompt's target; the metric ``exact_match`` is 1 where
    they are equal.
    """

    name = "ocr"

    def __init__(self, config: OcrConfig | None = None) -> None:
        self.config = config or OcrConfig()

    def explain_unavailable(self) -> str | None:
        from ebbflow.rewards.ppocr import DETECTOR, RECOGNISER, find_model_file

        try:
            find_model_file(RECOGNISER)
            # A line is read as it is; only a page has to be searched for text.
            if self.config.layout == "page":
                find_model_file(DETECTOR)
        except FileNotFoundError as error:
            return str(error)
        return None

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        from ebbflow.rewards.ppocr import read_lines_of_text, read_pages
        from ebbflow.rewards.text import score_readings

        readings: Sequence[str | None]
        failures: dict[int, str] | None = None
        if self.config.layout == "line":
            readings = read_lines_of_text(images)
        else:
            readings, failures = read_pages(images)
        return score_readings(
            readings, prompts, "exact_match", failures, self.config.match, self.config.case
        )
