r"""Supervised fine-tuning on the best samples of every group (rejection sampling): L = mean((v - u)^2), u = eps - x0.

The best are chosen inside each group by their advantage. A group without a spread has no best sample and is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, flow_matching_error
from ebbflow.recipe.algorithms import GROUP_SIZE, ForwardConfig, Published, SigmaConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


SFT = "yifan123/flow_grpo config/sft.py pickscore_sd3"
BASE = "yifan123/flow_grpo config/base.py"


class SFTConfig(ForwardConfig):
    """Flow matching on the best samples of every group (rejection sampling)."""

    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde", "steps": 40}, "updates_per_step": 1}
    published: ClassVar = {
        "algorithm.best": Published(
            1, "yifan123/flow_grpo flow_grpo/stat_tracking.py", "more where several have the best reward"
        ),
        "algorithm.noise_levels": Published(
            39, "yifan123/flow_grpo scripts/train_sd3_sft.py", "int(.99 * 40), all in one update"
        ),
        "algorithm.sigma.kind": Published("logit_normal", "yifan123/flow_grpo scripts/train_sd3_sft.py"),
        "algorithm.sigma.shift": Published(3.0, "yifan123/flow_grpo scripts/train_sd3_sft.py", "of SD3's scheduler"),
        "sampler.name": Published("flow_sde", SFT, "eta .7, though no log-prob is used"),
        "sampler.steps": Published(40, SFT),
        "reference.weight": Published(0.0, SFT),
        "optimizer.lr": Published(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": Published(1e-4, BASE),
        "optimizer.max_grad_norm": Published(1.0, BASE),
        "updates_per_step": Published(1, "yifan123/flow_grpo config/sft.py geneval_sd3"),
        "group_size": Published(24, SFT, deviation=GROUP_SIZE),
    }

    name: Literal["sft"] = "sft"
    noise_levels: int = Field(39, ge=1)
    """Draws of (sigma, noise) per sample and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="logit_normal", shift=3.0)
    """As SD3 was trained, and as Flow-GRPO's code has it."""
    best: int = Field(1, ge=1)
    """Samples per group that are learnt from."""


def loss(rows: ForwardRows, config: SFTConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    return flow_matching_error(rows, rows.velocity), {}


def best(advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: SFTConfig) -> list[np.ndarray]:
    """The best ``config.best`` samples of each group, each by itself."""
    groups = grouping.groups(advantage, keep, prompt_ids, config)
    ranked = [group[(-advantage[group]).argsort(kind="stable")] for group in groups]
    return [sample for group in ranked for sample in group[: config.best, None]]


ALGORITHM = Algorithm(SFTConfig, loss, select=best)
