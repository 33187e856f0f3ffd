"""Compare the text that was read with the text that a prompt asks for. Every reward that reads
scores in this one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rapidfuzz.distance import Levenshtein

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.rewards import Case, Match
from ebbflow.rewards.base import NO_TARGET, RewardResult


def compute_text_similarity(
    read: str, target: str, match: Match = "exact", case: Case = "ignored"
) -> float:
    """Return 1 - min(Levenshtein, len) / len on text without white space, len that of the target:
    in [0, 1].

    Example:
        "OPEN DAILY" for "OPEN" has a distance of 5 from a target of 4 letters: 0. "OPFN" has one of
        1: .75.

    Text is lower-cased first, unless ``case`` is "kept".

    The OCR reward of Flow-GRPO (2505.05470). Its code, and that of DiffusionNFT and VeRL-Omni,
    gives 1 whenever the target is contained in the reading ("OPEN DAILY" for "OPEN"): ``match``
    "contained".

    Raises:
        ValueError: the target is blank, so that there is nothing to read.
    """
    read = _fold_text(read, case)
    target = _fold_text(target, case)
    if not target:
        raise ValueError("the target text is blank; leave it out instead")
    if match == "contained" and target in read:
        return 1.0
    # The distance can exceed the length of the target where more is read than was asked for.
    return 1 - min(Levenshtein.distance(read, target), len(target)) / len(target)


def is_exact_match(read: str, target: str, case: Case = "ignored") -> float:
    """Return 1.0 where the folded texts are equal, else 0.0."""
    return float(_fold_text(read, case) == _fold_text(target, case))


def score_readings(
    readings: Sequence[str | None],
    prompts: Sequence[Prompt],
    exact_name: str,
    failures: Mapping[int, str] | None = None,
    match: Match = "exact",
    case: Case = "ignored",
) -> RewardResult:
    """Score N readings against their prompts' targets, with exact matches as the metric
    ``exact_name`` whatever ``match`` is.

    A reading of None failed; ``failures`` says why, by position. A prompt without a target is a
    failure too.
    """
    reasons = dict(failures or {})
    values = np.full(len(readings), np.nan)
    matches = np.full(len(readings), np.nan)
    for index, (reading, prompt) in enumerate(zip(readings, prompts, strict=True)):
        if prompt.target is None:
            reasons[index] = NO_TARGET
        elif reading is not None:
            # An image without text is read as "": a score of 0, and no failure.
            values[index] = compute_text_similarity(reading, prompt.target, match, case)
            matches[index] = is_exact_match(reading, prompt.target, case)
    return RewardResult(values, {exact_name: matches}, reasons)


def _fold_text(text: str, case: Case) -> str:
    if case == "ignored":
        text = text.lower()
    # No white space: readers put a blank, or none, where letters stand far apart.
    return "".join(text.split())
