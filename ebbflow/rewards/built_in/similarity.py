"""``similarity``: how much the letters of an image look like rendered ones. A guardrail that needs
no network and no program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ebbflow.extras import explain_missing
from ebbflow.recipe.rewards import ReadingRewardConfig
from ebbflow.rewards.base import NO_TARGET, Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np

    from ebbflow.data.prompts import Prompt

SIZES = (0.9, 1.0, 1.1)
"""Font sizes to try, as shares of the largest that fits: layout is not what this judges."""
REACH = 0.25
"""How far outside its slot a letter may stand, in slots."""
MARGIN = 2
"""Pixels of white around the image, for letters that touch its edge."""
FLAT = 1.0
"""Grey levels of standard deviation below which there is nothing to see."""


class SimilarityConfig(ReadingRewardConfig):
    """Likeness of the letters to rendered ones of the target text, 0 to 1."""

    name: Literal["similarity"] = "similarity"

    def build(self) -> Reward:
        return Similarity()


class Similarity(Reward):
    """Mean over the target's letters of the best match of the rendered letter near its place.

    The match is the zero-mean normalised cross-correlation, in [-1, 1], over positions and sizes.
    Clean renderings score .99; grain, broken strokes and wrong letters cost; a wrong letter still
    matches by about .5, so look at differences.
    """

    name = "similarity"

    def explain_unavailable(self) -> str | None:
        return explain_missing("it", "cv2", "matplotlib")

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        import cv2
        import numpy as np

        values = np.full(len(images), np.nan)
        failures: dict[int, str] = {}
        for index, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            if prompt.target is None:
                failures[index] = NO_TARGET
                continue
            try:
                values[index] = match_letters(
                    cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), prompt.target
                )
            except ValueError as error:
                failures[index] = str(error)
        return RewardResult(values, failures=failures)


def match_letters(grey: np.ndarray, text: str) -> float:
    """Return the similarity of one grey image, uint8 [height, width], to a line of text, 0 to 1; 0
    for a flat image.

    Raises:
        ValueError: the text cannot be rendered at this size.
    """
    import numpy as np

    from ebbflow.models.glyph_training.lettering import find_fitting_size

    height, width = grey.shape
    text = " ".join(text.split())
    size = find_fitting_size(text, height, width)
    # Normalised by almost nothing, the correlation of a flat image would be that of its noise.
    if grey.std() < FLAT:
        return 0.0
    # Each letter is looked for near its slot; all slots have one width.
    slot = width / len(text)
    padded = np.pad(grey, MARGIN, constant_values=255)
    matches = []
    for index, letter in enumerate(text):
        if letter != " ":
            left = max(0, (index - REACH) * slot)
            right = (index + 1 + REACH) * slot + 2 * MARGIN
            matches.append(_find_best_match(padded[:, int(left) : int(right)], letter, size))
    # The gate takes 0 for the lowest score; a letter whose opposite is drawn is as wrong as any.
    return max(0.0, float(np.mean(matches)))


def _find_best_match(window: np.ndarray, letter: str, size: float) -> float:
    """Return the largest correlation over sizes and positions; -1 where no size fits into the
    window.
    """
    import cv2

    best = -1.0
    for share in SIZES:
        template = _render_template(letter, share * size)
        if template.shape[0] <= window.shape[0] and template.shape[1] <= window.shape[1]:
            best = max(best, float(cv2.matchTemplate(window, template, cv2.TM_CCOEFF_NORMED).max()))
    return best


@lru_cache(maxsize=4096)
def _render_template(letter: str, size: float) -> np.ndarray:
    from ebbflow.models.glyph_training.lettering import render_letter

    return render_letter(letter, size)
