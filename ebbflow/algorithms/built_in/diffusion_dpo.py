r"""Diffusion-DPO (2311.12908): of a pair, the better sample's error must fall more than the worse
one's.

    e = mean((v - u)^2),   u = eps - x0
    L = -log sigmoid( -(beta / 2) [(e_better - e_better_ref) - (e_worse - e_worse_ref)] )

sigma (logit-normal, shifted by 3) and eps are shared inside a pair. Pairs come from a file, or from
a group: its best sample against its worst, or a share of the best against as many of the worst;
ties make no pair (published code trains on them). The reference is the base model, or, refreshed
every n optimiser steps, an older self. Both rows of a pair carry its loss, so that the mean over
the rows is the mean over the pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import (
    Algorithm,
    CopyName,
    ForwardRows,
    RowMetrics,
    compute_flow_matching_error,
    select_groups,
)
from ebbflow.recipe.algorithms import GROUP_SIZE, ForwardConfig, PublishedSetting, SigmaConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


DPO = "yifan123/flow_grpo config/dpo.py pickscore_sd3"
BASE = "yifan123/flow_grpo config/base.py"


class DiffusionDPOConfig(ForwardConfig):
    """Preference pairs: better against worse, from a file or from the samples of a group."""

    paper: ClassVar = "2311.12908"
    only_selects: ClassVar = True
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde", "steps": 40}, "updates_per_step": 1}
    published: ClassVar = {
        "algorithm.beta": PublishedSetting(
            100.0,
            DPO,
            "the same in verl-project/verl-omni; 2000 in the paper and in X-GenGroup/Flow-Factory",
        ),
        "algorithm.noise_levels": PublishedSetting(
            39, "yifan123/flow_grpo scripts/train_sd3_dpo.py", "int(.99 * 40), all in one update"
        ),
        "algorithm.sigma.kind": PublishedSetting(
            "logit_normal", "yifan123/flow_grpo scripts/train_sd3_dpo.py"
        ),
        "algorithm.sigma.shift": PublishedSetting(
            3.0, "yifan123/flow_grpo scripts/train_sd3_dpo.py", "of SD3's scheduler"
        ),
        "algorithm.pairs_share": PublishedSetting(
            0.0,
            "yifan123/flow_grpo flow_grpo/stat_tracking.py",
            "the best with the worst: one pair",
        ),
        "algorithm.refresh_every": PublishedSetting(
            0, DPO, "ref_update_step 10000000; 40 makes it online DPO"
        ),
        "sampler.name": PublishedSetting("flow_sde", DPO, "eta .7, though no log-prob is used"),
        "sampler.steps": PublishedSetting(40, DPO),
        "reference.weight": PublishedSetting(0.0, DPO),
        "optimizer.lr": PublishedSetting(
            3e-4, BASE, "of LoRA adapters; 2e-4 in verl-omni's run_sd35_medium_offline_dpo_lora.sh"
        ),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(1, "yifan123/flow_grpo config/dpo.py geneval_sd3"),
        "group_size": PublishedSetting(24, DPO, deviation=GROUP_SIZE),
    }

    name: Literal["diffusion_dpo"] = "diffusion_dpo"
    noise_levels: int = Field(39, ge=1)
    """Number of (sigma, noise) samples per pair and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="logit_normal", shift=3.0)
    """Distribution of the sigmas. The default is that of SD3's training and of Flow-GRPO's code."""
    beta: float = Field(100.0, gt=0)
    """Strength of the preference. The errors that it multiplies are means over the latent's
    elements. Published: 100 to 2000 and more.
    """
    pairs_share: float = Field(0.0, ge=0, le=0.5)
    """Share of each group's samples, at either end, that make pairs: the best sample with the
    worst, the second best with the second worst, and so on. Without a share, the best and the worst
    make one pair. Samples with equal rewards make none.
    """
    refresh_every: int = Field(0, ge=0)
    """Optimiser steps after which the policy replaces the reference of the pairs. 0: the reference
    stays the base model.
    """


def compute_loss(rows: ForwardRows, config: DiffusionDPOConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]; rows 2i and 2i + 1 are the better and the
    worse sample of a pair.
    """
    # Not at the top of the file: reading a recipe imports it, and must not load torch.
    from torch.nn.functional import logsigmoid

    # e - e_ref of every sample, [M]; below 0 where the policy predicts u better than the reference.
    reference = rows.copies[choose_reference_copy(config)]
    error = compute_flow_matching_error(rows, rows.velocity)
    change = error - compute_flow_matching_error(rows, reference)

    # -(beta / 2) [(e_better - e_better_ref) - (e_worse - e_worse_ref)], [M / 2]. select_pairs puts
    # the better sample first, and the two rows of a pair, which share a group, are neighbours.
    better, worse = change.view(-1, 2).unbind(1)
    margin = -0.5 * config.beta * (better - worse)

    # logsigmoid and not log(sigmoid), which is -inf below about -100: published betas reach that.
    total = -logsigmoid(margin)
    metrics = {
        "dpo/margin": margin,
        "dpo/accuracy": (margin > 0).float(),
        "dpo/better_change": better,
        "dpo/worse_change": worse,
    }
    # Both rows of a pair get its loss: the update takes the mean over rows.
    total = total.repeat_interleave(2)
    return total, {name: value.repeat_interleave(2) for name, value in metrics.items()}


def choose_reference_copy(config: DiffusionDPOConfig) -> CopyName:
    """Choose the copy that stands as the reference of the pairs."""
    # A reference that is refreshed has to be a copy of its own: "reference" is the base model,
    # which the velocity drift is measured against.
    return "old" if config.refresh_every else "reference"


def compute_old_decay(config: DiffusionDPOConfig, optimizer_step: int) -> float:
    """Compute d of copy <- d copy + (1 - d) theta: 0, a fresh copy, every ``refresh_every``
    optimiser steps, and 1, the copy as it is, in between.
    """
    is_due = config.refresh_every > 0 and optimizer_step % config.refresh_every == 0
    return 0.0 if is_due else 1.0


def select_pairs(
    advantage: np.ndarray, keep: np.ndarray, prompt_ids: np.ndarray, config: DiffusionDPOConfig
) -> list[np.ndarray]:
    """Select (better, worse) pairs in each group: its best with its worst, the second best with the
    second worst and so on; no ties.
    """
    import numpy as np

    pairs = []
    for group in select_groups(advantage, keep, prompt_ids, config):
        # Stable, so that equal advantages keep their order on every machine.
        best_first = group[np.argsort(-advantage[group], kind="stable")]
        count = max(1, int(config.pairs_share * len(group)))
        best = best_first[:count]
        worst = best_first[::-1][:count]
        pairs += [np.array(pair) for pair in zip(best, worst, strict=True)]
    # Published code trains on ties, too. A tie says nothing of which sample is better, but its
    # gradient is not 0.
    return [pair for pair in pairs if advantage[pair[0]] > advantage[pair[1]]]


ALGORITHM = Algorithm(
    DiffusionDPOConfig,
    compute_loss,
    copies=lambda config: frozenset({choose_reference_copy(config)}),
    select=select_pairs,
    follows={"old": compute_old_decay},
)
