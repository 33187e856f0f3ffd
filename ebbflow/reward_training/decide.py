"""Decide whether a new reward model replaces the registered one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from pydantic import BaseModel

from ebbflow.evaluation.mean_test import compute_p_values
from ebbflow.evaluation.statistics import compute_paired_interval

CHANCE = 0.5


class RewardModelDecision(BaseModel):
    """Whether a reward model becomes champion, and why.

    Attributes:
        difference, low, high: agreement of the new model minus that of the champion on the same
            held-out answers, or minus one half where there is no champion.
    """

    promote: bool
    reasons: list[str]
    difference: float
    low: float
    high: float


class HackedShare(Protocol):
    """How often the honest picture of a pair is preferred, with its interval."""

    mean: float
    high: float


def decide_reward_model(
    candidate: Mapping[str, float],
    champion: Mapping[str, float] | None,
    hacked: Mapping[str, HackedShare],
    confidence: float,
) -> RewardModelDecision:
    """Decide by the held-out answers and by hacked pictures.

    A reward model is promoted where it agrees more often than the champion, with the paired
    interval over prompts above 0, also if the next prompt contradicted it entirely, and no kind of
    hacked pictures is shown to be preferred to the honest ones, with an interval below one half.

    Example:
        All prompts agree, there is no champion, and ``confidence`` is .95: 5 prompts are too few,
        as .5^5 > .025, and 6 are enough.

    Args:
        candidate, champion: agreement by held-out prompt, of the same prompts; None without a
            champion, where chance takes its place.
    """
    # Sorted, so that both sides are paired prompt by prompt.
    prompts = sorted(candidate)
    ours = np.array([candidate[prompt] for prompt in prompts])
    # Without a champion, a coin is what the first model has to beat.
    theirs = np.full(len(prompts), CHANCE)
    rival = "chance"
    worst = -CHANCE
    if champion is not None:
        theirs = np.array([champion[prompt] for prompt in prompts])
        rival = "the champion"
        worst = -1.0
    difference, low, high = compute_paired_interval(ours, theirs, confidence)
    reasons = []
    if low <= 0:
        reasons.append(
            f"it does not agree more often with held-out answers than {rival}: {difference:+.3f},"
            f" interval {low:+.3f} to {high:+.3f}; label more pairs"
        )
    # The interval knows only the differences that were seen: where all are above 0, so is its lower
    # end, with two prompts as well.
    elif compute_p_values(ours - theirs, worst) > (1 - confidence) / 2:
        reasons.append(
            f"{len(prompts)} held-out prompts are too few to show that it agrees more often than"
            f" {rival}; label more prompts"
        )
    # Only what is shown counts: with few hacked pairs an interval is wide, and a model that is
    # indifferent to a flaw does not reward it.
    reasons += [
        f"it prefers hacked pictures of the kind {kind!r}: the honest ones win"
        f" {share.mean:.0%} of the pairs; label such pairs"
        for kind, share in hacked.items()
        if share.high < CHANCE
    ]
    return RewardModelDecision(
        promote=not reasons, reasons=reasons, difference=difference, low=low, high=high
    )
