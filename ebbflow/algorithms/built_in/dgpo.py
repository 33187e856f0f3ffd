r"""DGPO (2510.08425): direct preference between the better and the worse part of a whole group.

    d   = mean((v - u)^2),   u = eps - x0
    S_g = (1 / K) sum over the group of A beta (sg d - d_ref)
    L   = mean[sg sigmoid(S_g) A d]

without the gradient of rows that are further from d_old than the clip range and move away:

    (rho > 1 + eps and A > 0) or (rho < 1 - eps and A < 0),   rho = exp(d_old - d)

sigma and eps are shared inside a group. What a group still has to gain, sigmoid(S_g), weighs its
rows; the sampler may be deterministic. v_old is a copy that follows closely: min(.3, .001 n). The
clip is that of the published code, as is the reference penalty; K is the number of samples of the
group that are trained on, where published code has all of them. From optimiser step 200 or 500 on,
published code generates with the copy: here the policy itself always does.
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
from ebbflow.algorithms.group_preference import compute_group_weight, find_clipped_rows
from ebbflow.recipe.algorithms import (
    SUM_OF_REWARDS,
    EmaScheduleConfig,
    ForwardConfig,
    PublishedSetting,
    SigmaConfig,
)

if TYPE_CHECKING:
    from torch import Tensor


DGPO = "Luo-Yihong/DGPO config/dgpo.py geneval_sd3_4gpu"
CODE = "Luo-Yihong/DGPO scripts/train_sd3_dgpo.py"
BASE = "Luo-Yihong/DGPO config/base.py"


class DGPOConfig(ForwardConfig):
    """Group preference: the whole group decides how much each of its samples still has to gain."""

    paper: ClassVar = "2510.08425"
    stage_defaults: ClassVar = {
        "sampler": {"name": "dpm_solver", "steps": 10},
        "advantages": {"std": "group"},
        "reference": {"weight": 0.02},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.beta": PublishedSetting(100.0, DGPO, "10 for PickScore"),
        "algorithm.noise_levels": PublishedSetting(4, DGPO, "num_train_timesteps"),
        "algorithm.sigma.kind": PublishedSetting(
            "schedule", DGPO, "draws of the sampler's sigmas, without replacement"
        ),
        "algorithm.sigma.min": PublishedSetting(
            0.79, DGPO, "trunc_steps: the first 5 of 10; for OCR the first 7, {min: .6}"
        ),
        "algorithm.sigma.stratified": PublishedSetting(False, DGPO),
        "algorithm.clip_range": PublishedSetting(
            0.01, DGPO, "the same for OCR; .05 for PickScore, .001 without guidance"
        ),
        "algorithm.old.warmup": PublishedSetting(0, CODE),
        "algorithm.old.slope": PublishedSetting(0.001, CODE),
        "algorithm.old.max_decay": PublishedSetting(0.3, CODE),
        "sampler.name": PublishedSetting("dpm_solver", DGPO, "use_dpm"),
        "sampler.steps": PublishedSetting(10, DGPO),
        "what generates": PublishedSetting(
            "from optimiser step 500 on the copy",
            DGPO,
            "from step 200 on for OCR and PickScore",
            deviation="with a decay of .3 it is about a step behind",
            ours="the policy",
        ),
        "advantages.std": PublishedSetting("group", DGPO, "global for OCR and PickScore"),
        "advantages.combine": PublishedSetting(
            "sum", "yifan123/flow_grpo flow_grpo/rewards.py", deviation=SUM_OF_REWARDS
        ),
        "advantages.clip": PublishedSetting(5.0, BASE),
        "reference.weight": PublishedSetting(0.02, DGPO, "the same for OCR; .001 for PickScore"),
        "reference.penalty": PublishedSetting("velocity", CODE),
        "optimizer.lr": PublishedSetting(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(1, DGPO),
        "group_size": PublishedSetting(16, DGPO, "24 for better performance, its comment says"),
    }

    name: Literal["dgpo"] = "dgpo"
    noise_levels: int = Field(4, ge=1)
    """Number of (sigma, noise) samples per group and pass."""
    beta: float = Field(100.0, gt=0)
    """Strength of the preference. The errors that it multiplies are means over the latent's
    elements.
    """
    sigma: SigmaConfig = SigmaConfig(kind="schedule", min=0.79, stratified=False)
    """Distribution of the sigmas. Published: high noise only; with 10 steps and shift 3, the first
    5 sigmas for GenEval and the first 7 for OCR (``min: .6``).
    """
    clip_range: float | None = Field(0.01, gt=0, lt=1)
    """Clip range of exp(d_old - d), where the errors d are means over the latent's elements.
    ``null``: no clip and no old copy.
    """
    old: EmaScheduleConfig = EmaScheduleConfig(slope=0.001, max_decay=0.3)
    """The old copy, whose errors d_old the clip compares with."""


def compute_loss(rows: ForwardRows, config: DGPOConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # d, and sg d - d_ref: below 0 where the policy predicts u better than the reference does.
    error = compute_flow_matching_error(rows, rows.velocity)
    change = error.detach() - compute_flow_matching_error(rows, rows.copies["reference"])

    # sg sigmoid(S_g), the same at all rows of a group.
    weight = compute_group_weight(change, rows.advantage, rows.group_index, config.beta)
    metrics = {"dgpo/weight": weight, "dgpo/change": change}

    # A clipped row keeps its value and loses its gradient.
    if config.clip_range is not None:
        old_error = compute_flow_matching_error(rows, rows.copies["old"])
        clipped = find_clipped_rows(error, old_error, rows.advantage, config.clip_range)
        error = error.detach().where(clipped, error)
        metrics["dgpo/clipped"] = clipped.float()
    return weight * rows.advantage * error, metrics


def list_copies(config: DGPOConfig) -> frozenset[CopyName]:
    """List the copies whose predictions the loss needs."""
    return frozenset({"reference"} if config.clip_range is None else {"reference", "old"})


ALGORITHM = Algorithm(
    DGPOConfig,
    compute_loss,
    copies=list_copies,
    select=select_groups,
    follows={"old": lambda config, step: config.old.decay_after_step(step)},
)
