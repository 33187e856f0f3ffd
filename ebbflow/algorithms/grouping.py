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
    """Return every kept sample as a group of its own."""
    return list(keep.nonzero()[0][:, None])


def select_all_samples(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return every sample as a group of its own, whatever its reward said."""
    import numpy as np

    return list(np.arange(len(keep))[:, None])


def select_groups(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return the kept samples of each prompt, by ascending prompt id.

    Example:
        keep = [True, True, False, True] with prompt_ids = [7, 3, 7, 7] gives [[1], [0, 3]].
    """
    import numpy as np

    kept = np.flatnonzero(keep)
    # Sorted once, not searched for each prompt: a file of pairs has as many prompts as pairs.
    by_prompt = kept[np.argsort(prompt_ids[kept], kind="stable")]
    _, starts = np.unique(prompt_ids[by_prompt], return_index=True)
    # The first start is 0, so the first part is empty.
    return np.split(by_prompt, starts)[1:]


def select_all_groups(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: Any
) -> list[np.ndarray]:
    """Return all samples of each prompt, by ascending prompt id, whatever their rewards said."""
    import numpy as np

    return select_groups(advantage, np.ones_like(keep), prompt_ids, config)
