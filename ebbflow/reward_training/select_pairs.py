"""Choose which pictures people compare next: those of which the reward model knows least.

Half of the pairs are the most uncertain ones (uncertainty sampling, Lewis and Gale, A Sequential
Algorithm for Training Text Classifiers, 1994), where the predicted preference is nearest to one
half. The other half are drawn at random: the least certain pairs alone say little about how good
the model is, and pairs that hardly differ may be a tie to people, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from ebbflow.seeding import derive_seed, permute_indices

RANDOM_SHARE = 0.5


def select_pairs(
    prompt_ids: Sequence[int], scores: Sequence[float] | None, count: int, seed: int
) -> list[tuple[int, int]]:
    """Choose pairs of pictures of one prompt, each picture in one pair at most; the most uncertain
    ones first, then random ones.

    Args:
        prompt_ids: the prompt of each picture.
        scores: of a reward model for each picture; None without one, where all pairs are random.

    Returns:
        at most ``count`` pairs of positions.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for position, prompt_id in enumerate(prompt_ids):
        groups[prompt_id].append(position)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    # Shuffled first: among equally uncertain pairs the seed decides, not the order of prompts.
    shuffled = [pairs[index] for index in permute_indices(len(pairs), derive_seed(seed, "pairs"))]
    chosen: list[tuple[int, int]] = []
    used: set[int] = set()
    if scores is not None:
        # P(first is better) = s(gap): the smallest gap is nearest to one half.
        gaps = np.array([abs(scores[one] - scores[other]) for one, other in shuffled])
        uncertain = [shuffled[index] for index in np.argsort(gaps, kind="stable")]
        _take_pairs(uncertain, round(count * (1 - RANDOM_SHARE)), chosen, used)
    _take_pairs(shuffled, count, chosen, used)
    return chosen


def _take_pairs(
    pairs: Sequence[tuple[int, int]], count: int, chosen: list[tuple[int, int]], used: set[int]
) -> None:
    """Add pairs of pictures that are in no pair yet, until there are ``count``."""
    for pair in pairs:
        if len(chosen) >= count:
            return
        # One pair for each picture: three pairs of two pictures and a third say little more.
        if not used & set(pair):
            chosen.append(pair)
            used.update(pair)
