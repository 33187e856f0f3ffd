r"""Supervised fine-tuning on the best samples of every group (rejection sampling).

    L = mean((v - u)^2),   u = eps - x0

The best are chosen inside each group by their advantage. A group without a spread has no best
sample and is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import (
    Algorithm,
    ForwardRows,
    RowMetrics,
    compute_flow_matching_error,
    select_groups,
)
from ebbflow.algorithms.imitation import SFT, ImitationConfig
from ebbflow.recipe.algorithms import GROUP_SIZE, PublishedSetting

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class SFTConfig(ImitationConfig):
    """Flow matching on the best samples of every group (rejection sampling)."""

    only_selects: ClassVar = True
    published: ClassVar = {
        "algorithm.best": PublishedSetting(
            1,
            "yifan123/flow_grpo flow_grpo/stat_tracking.py",
            "more where several have the best reward",
        ),
        **ImitationConfig.published,
        "group_size": PublishedSetting(24, SFT, deviation=GROUP_SIZE),
    }

    name: Literal["sft"] = "sft"
    best: int = Field(1, ge=1)
    """Number of best samples of each group to train on."""


def compute_loss(rows: ForwardRows, config: SFTConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    return compute_flow_matching_error(rows, rows.velocity), {}


def select_best_samples(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: SFTConfig
) -> list[np.ndarray]:
    """Select the best ``config.best`` samples of each group, each as a group of its own."""
    groups = select_groups(advantage, keep, prompt_ids, config)
    # Stable: of equal samples the first. Published code trains on all that share the best reward.
    best_first = [group[(-advantage[group]).argsort(kind="stable")] for group in groups]
    # [best, 1] of each group: every sample stands alone, as the loss compares no rows.
    return [sample for group in best_first for sample in group[: config.best, None]]


ALGORITHM = Algorithm(SFTConfig, compute_loss, select=select_best_samples)
