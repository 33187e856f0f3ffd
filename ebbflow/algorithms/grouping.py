"""Which samples are trained on, and which of them must stay together: single ones, pairs or whole
groups.

Every function takes the advantages [N], which samples are worth training on [N] and their prompt
ids [N], and returns index arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def select_kept_samples(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Every kept sample by itself."""
    return list(keep.nonzero()[0][:, None])


def select_all_samples(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Every sample by itself, whatever its reward said."""
    import numpy as np

    return list(np.arange(len(keep))[:, None])


def select_groups(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """The kept samples of each prompt, by ascending prompt id."""
    import numpy as np

    kept = np.flatnonzero(keep)
    by_prompt = kept[
        np.argsort(prompt_ids[kept], kind="stable")
    ]  # sorted once: of a file of pairs every row is a prompt
    _, starts = np.unique(prompt_ids[by_prompt], return_index=True)
    return np.split(by_prompt, starts)[1:]  # before the first start there is nothing
