"""What a look at the held-out prompts may spend of the registered model's error budget, and how
many prompts a decision needs.

A year of looks at candidates that are no better than the champion promotes one of them with a
probability of at most ``promotion.error_budget``: look k promotes if its p-value is below e_k, and
the e_k of any 365 days add up to at most the budget (Bonferroni's inequality: looks at the same
prompts may depend on each other). Every look gets the same share while the budget lasts, as the
chance to find a gain is a concave function of it, and half of what is left from the last of the
``promotion.looks_per_year`` on. The ledger of the looks is in ``ebbflow.registry.looks``.

The gain must be proven even if a prompt that was not seen falls as far as scores can, by ``d``.
That bounds what any valid test can show: a candidate that gains g on a share 1 - q of all prompts
and falls by d on the others, with (1 - q) g = q d, is no better, and shows n gains and no fall in
(1 - q)^n of its samples. So n equal gains of g prove something at an error e only if (1 + g / d)^-n
< e: at e = .05 / 52 and d = 2.5 standard deviations 64 prompts need .29 of them and 128 need .14,
whatever the number of samples.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

from ebbflow.evaluation.mean_test import compute_p_values
from ebbflow.recipe import Recipe
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.promotion import PromotionConfig
from ebbflow.recipe.rewards import select_trained

POWER = 0.8
"""Chance to prove the smallest gain that is stated for a number of prompts."""
LOWEST_IN_DEVIATIONS = 2.5
"""Assumed distance of the worst score from the champion's mean, in standard deviations of its
prompts, before any score is known: that of a score from 0 to 1 with mean .5 and deviation .2.
"""
MAX_PROMPTS = 2**14
HALVINGS = 14
"""Of the gains up to five standard deviations: to .0003 of them."""


def compute_look_error(promotion: PromotionConfig, spent: float) -> float:
    """Compute the p-value below which a look may promote.

    Args:
        spent: of the budget, by the other looks of the last 365 days.
    """
    share = promotion.error_budget / promotion.looks_per_year
    # Never more than is left, and never nothing: a run that comes too often is not refused without
    # a look at it, but has to show more and more.
    return min(share, max(promotion.error_budget - spent, 0.0) / 2)


def compute_lowest_reward(recipe: Recipe, columns: list[str]) -> float | None:
    """Compute the lowest possible weighted sum of the rewards; None where that of one is unknown.

    Args:
        columns: of the table of samples. Rewards that compare the images of a prompt have none.
    """
    evaluated = [reward for reward in select_trained(recipe.rewards) if reward.column in columns]
    sums = []
    # Without a mixture there is one set, which has no name.
    for name in recipe.prompts.prompt_set_labels or [""]:
        total = 0.0
        for reward in evaluated:
            if not reward.applies_to(name):
                continue
            if reward.lowest_score is None:
                return None
            total += reward.weight * reward.lowest_score
        sums.append(total)
    return min(sums) if evaluated else None


# A process that describes several recipes asks for the same gains, each of dozens of integrals.
@cache
def find_smallest_gain(prompts: int, error: float, samples: float = 1.0) -> float:
    """Find the smallest gain that a look proves in four of five cases (``POWER``), in standard
    deviations of the champion's prompts.

    Assumes that the differences of single samples have the same standard deviation and are
    independent of each other, and a worst score ``LOWEST_IN_DEVIATIONS`` below the champion's mean.
    Infinite where no gain up to that range can be proven.

    Args:
        samples: of each prompt (``count_effective_samples``).
    """
    normal = NormalDist()
    # An ideal sample: the quantiles of the differences around their mean.
    shape = np.array([normal.inv_cdf((rank + 0.5) / prompts) for rank in range(prompts)])
    shape /= shape.std() * math.sqrt(samples)
    # In four of five cases the sample's mean is no further below the true one than this.
    luck = normal.inv_cdf(POWER) / math.sqrt(prompts * samples)
    low = 0.0
    high = 2 * LOWEST_IN_DEVIATIONS
    for _ in range(HALVINGS):
        gain = (low + high) / 2
        values = shape + gain - luck
        worst = min(float(values.min()), -LOWEST_IN_DEVIATIONS)
        if compute_p_values(values, worst) < error:
            high = gain
        else:
            low = gain
    return high if high < 2 * LOWEST_IN_DEVIATIONS else math.inf


def count_effective_samples(prompts: int, repeated: int, samples: int) -> float:
    """Count the samples of each prompt that an evaluation is worth, where a part of the prompts has
    several.

    Example:
        16 of 128 prompts with 4 samples and 112 with one: the mean over prompts has the variance
        (16 / 4 + 112) / 128^2 of a single sample, as with 128 / 116 = 1.1 samples of each.
    """
    repeated = min(repeated, prompts)
    return prompts / (repeated / samples + prompts - repeated)


def find_needed_prompts(gain: float, error: float, samples: float = 1.0) -> int:
    """Find about how many prompts prove a gain (``find_smallest_gain``), to within a tenth.

    Raises:
        ValueError: more than ``MAX_PROMPTS`` would be needed.
    """
    high = MIN_PROMPTS
    while find_smallest_gain(high, error, samples) > gain:
        high *= 2
        if high > MAX_PROMPTS:
            raise ValueError(f"a gain of {gain:g} standard deviations needs too many prompts")
    low = high // 2
    while high > MIN_PROMPTS and high - low > low // 10:
        middle = (low + high) // 2
        if find_smallest_gain(middle, error, samples) > gain:
            low = middle
        else:
            high = middle
    return high
