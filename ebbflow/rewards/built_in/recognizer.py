"""``recognizer``: a small network that reads the pictures of the glyph model, with a gradient for
algorithms that learn from it.

It is trained in seconds at its first use (``ebbflow.models.glyph_training.recognizer``). A policy
that follows its gradient finds what it is blind to: watch ``ocr``, ``tesseract`` or ``similarity``
as guardrails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ebbflow.recipe.rewards import ReadingRewardConfig
from ebbflow.rewards.base import NO_TARGET, Reward, RewardResult

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ebbflow.data.prompts import Prompt

BATCH = 256
"""Images per forward pass."""
MAX_HEIGHT = 64
MAX_WIDTH = 256
"""Pixels, of the largest pictures that the glyph model draws."""


class RecognizerConfig(ReadingRewardConfig):
    """Mean log-probability of the target's letters A-Z under a network trained on rendered letters,
    about -6 to -.1.
    """

    name: Literal["recognizer"] = "recognizer"

    def build(self) -> Reward:
        return Recognizer()


class Recognizer(Reward):
    """Mean log-probability of the target's letters; the metric ``recognizer_exact`` is 1 where each
    is the likeliest.
    """

    has_gradient = True

    name = "recognizer"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        import numpy as np
        import torch

        from ebbflow.models.base import default_device

        values = np.full(len(images), np.nan)
        exact = np.full(len(images), np.nan)
        reasons = [
            _explain_unreadable_size(prompt.target, *images.shape[1:3]) for prompt in prompts
        ]
        readable = [index for index, reason in enumerate(reasons) if reason is None]
        with torch.no_grad():
            for start in range(0, len(readable), BATCH):
                part = readable[start : start + BATCH]
                pixels = torch.from_numpy(images[part]).to(default_device())
                pixels = pixels.permute(0, 3, 1, 2).float() / 255  # (n, H, W, 3) -> (n, 3, H, W)
                scores, matches = _score_letters(pixels, [prompts[index] for index in part])
                values[part] = scores.double().cpu().numpy()
                exact[part] = matches.cpu().numpy()
        failures = {index: reason for index, reason in enumerate(reasons) if reason is not None}
        return RewardResult(values, {"recognizer_exact": exact}, failures)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """As ``Reward.score_with_gradient``; every image must be one that can be scored."""
        return _score_letters(images, prompts)[0]


def _score_letters(images: Tensor, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Return (scores with gradient [N], whether all letters are the likeliest, bool [N]) of RGB in
    [0, 1], [N, 3, height, width].
    """
    import torch
    from torch.nn.functional import one_hot

    from ebbflow.models.glyph_training.recognizer import letter_indices, open_recognizer

    texts = [fold_target(prompt.target or "") for prompt in prompts]
    # There is a network for each number of letters: how many letters a picture has is given.
    rows_by_length: dict[int, list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        rows_by_length[len(text)].append(row)
    scores = []
    matches = []
    for num_letters, rows in rows_by_length.items():
        network = open_recognizer(*images.shape[2:], num_letters).to(images.device)
        targets = letter_indices([texts[row] for row in rows]).to(images.device)  # [n, letters]
        log_probs = network(images[rows].mean(1, keepdim=True))  # [n, letters, alphabet]
        # No gather: its gradient is not deterministic.
        scores.append((log_probs * one_hot(targets, log_probs.shape[2])).sum(2).mean(1))
        matches.append((log_probs.argmax(2) == targets).all(1))
    # Back from the order of the lengths to that of the images.
    order = torch.tensor(
        [row for rows in rows_by_length.values() for row in rows], device=images.device
    ).argsort()
    return torch.cat(scores)[order], torch.cat(matches)[order]


def _explain_unreadable_size(target: str | None, height: int, width: int) -> str | None:
    """Return why a picture of a size cannot be scored; None if it can."""
    from ebbflow.models.families.glyph import ALPHABET
    from ebbflow.models.glyph_training.lettering import find_fitting_size

    if target is None:
        return NO_TARGET
    text = fold_target(target)
    if not text or set(text) - set(ALPHABET):
        return f"the recogniser reads letters A-Z, and the target is {target!r}; take ocr"
    if height > MAX_HEIGHT or width > MAX_WIDTH:
        return (
            f"the recogniser reads up to {MAX_HEIGHT}x{MAX_WIDTH} pixels, and this picture is"
            f" {height}x{width}; take ocr"
        )
    try:
        find_fitting_size(text, height, width)
    except ValueError as error:
        return str(error)
    return None


def fold_target(target: str) -> str:
    """Return a target as the network reads it: capitals without blanks."""
    return "".join(target.split()).upper()
