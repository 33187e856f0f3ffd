"""Which samples are trained on, and which of them must stay together: single ones, pairs or whole groups.

Every function takes the advantages [N], which samples are worth training on [N] and their prompt ids [N], and returns index
arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbflow.recipe.algorithms import DiffusionDPOConfig, SFTConfig


def each_kept_sample(advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any) -> list[np.ndarray]:
    """Every kept sample by itself."""
    return list(np.flatnonzero(keep)[:, None])


def all_samples(advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any) -> list[np.ndarray]:
    """Every sample by itself, whatever its reward said."""
    return list(np.arange(len(keep))[:, None])


def groups(advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any) -> list[np.ndarray]:
    """The kept samples of each prompt."""
    return _groups(keep, prompt_ids)


def best(advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: SFTConfig) -> list[np.ndarray]:
    """The best ``config.best`` samples of each group, each by itself."""
    ranked = [group[np.argsort(-advantage[group], kind="stable")] for group in _groups(keep, prompt_ids)]
    return [sample for group in ranked for sample in group[: config.best, None]]


def pairs(advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: DiffusionDPOConfig) -> list[np.ndarray]:
    """(better, worse) of each group: its best with its worst, the second best with the second worst and so on; no ties."""
    found = []
    for group in _groups(keep, prompt_ids):
        ranked = group[np.argsort(-advantage[group], kind="stable")]
        count = max(1, int(config.pairs_share * len(group)))
        found += [np.array(pair) for pair in zip(ranked[:count], ranked[::-1][:count], strict=True)]
    return [pair for pair in found if advantage[pair[0]] > advantage[pair[1]]]


def _groups(keep: np.ndarray, prompt_ids: np.ndarray) -> list[np.ndarray]:
    """The kept samples of each prompt, by ascending id; sorted once, because of a file of pairs every row is a prompt."""
    kept = np.flatnonzero(keep)
    by_prompt = kept[np.argsort(prompt_ids[kept], kind="stable")]
    _, starts = np.unique(prompt_ids[by_prompt], return_index=True)
    return np.split(by_prompt, starts)[1:]  # before the first start there is nothing
