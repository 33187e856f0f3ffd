r"""TDM-R1 (2603.07700): TDM whose student also learns from rewards without a gradient.

The *surrogate* is a second trained copy, which starts at the teacher. A step k of the student's K
is drawn for each group, with probability proportional to k; x', where it ends, is noised again to t
with one noise for the group. There, with the velocity u that has the score of this noise,

    d   = mean((v_surrogate - u)^2)
    S_g = mean over the group of A beta (sg d - d_teacher)
    L_s = k/K [sg sigmoid(S_g) A d + w mean((v_surrogate - v_teacher)^2)]

which is the loss of DGPO (``ebbflow.algorithms.built_in.dgpo``). d has no gradient in rows that
have moved away from the surrogate's moving average,

    (rho > 1 + eps and A > 0) or (rho < 1 - eps and A <= 0),   rho = exp(d_old - d)

nor, where the group's mean((v_surrogate - v_teacher)^2) is above a limit, in rows with (d <
d_teacher and A > 0) or (d > d_teacher and A <= 0). The reward of the sample is that of every step's
end, as the steps are deterministic.

The student has the gradient of TDM (``ebbflow.algorithms.distribution_matching``) and that of the
surrogate reward, at another noise level of x':

    g   = g_TDM + c (x0_teacher - x0_surrogate) / mean|x0_hat - x0_surrogate|
    L   = mean((x0_hat - sg(x0_hat - g))^2) / 2

x0_surrogate may have guidance (``surrogate_guidance``), x0_teacher has none there. In the published
code the part of guidance in g_TDM counts ``tdm_weight`` = .3 and the reward the rest of 1; with its
guidance of 4.5 that is a guidance of 1 + .3 * 3.5 = 2.05 here.

Deviations, beside those of TDM: mean|x0_hat - x0_teacher| is with that guidance, not 4.5. Groups
have a step and noise level each, and samples one step of the student, where published code draws
them for the whole batch and takes two steps of each sample. The limit is of a group's distance, not
of a process's part of the batch. ``surrogate_sigma.min`` is the lowest level itself, to which
published code adds .02, and the noise where the student asks the surrogate is of each sample, not
of a group. Published code also pulls the fake score to the teacher (.02), and
ends the reward after two steps for two of its four rewards; neither is here. x' is sampled anew
from the noise of the rollout: after the first update of a step, or with rollouts of older weights,
it is near the sample that was scored, not that sample.

Settings are those of the published OCR run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import (
    Algorithm,
    MatchingRows,
    RowMetrics,
    SurrogateRows,
    compute_group_mean,
    expand_like,
    mean_per_row,
    select_all_groups,
)
from ebbflow.algorithms.distribution_matching import TINY, compute_gradient
from ebbflow.algorithms.group_preference import compute_group_weight, find_clipped_rows
from ebbflow.recipe.algorithms import (
    GROUP_SIZE,
    TEACHER_GUIDANCE,
    EmaScheduleConfig,
    PublishedSetting,
    SigmaConfig,
    SurrogateConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

OCR = "Luo-Yihong/TDM-R1 config/tdmr1_clean.py general_ocr_sd3_8gpu_G24_4step"
SHARED = "Luo-Yihong/TDM-R1 config/tdmr1_clean.py compressibility"
BASE = "Luo-Yihong/TDM-R1 config/base.py"
CODE = "Luo-Yihong/TDM-R1 scripts/train_tdmr1_pub.py"


class TDMR1Config(SurrogateConfig):
    """TDM-R1: as TDM, with rewards that need no gradient, learnt by a denoiser beside the
    student.
    """

    paper: ClassVar = "2603.07700"
    level_gap: ClassVar = 0.02
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 4},
        "advantages": {"std": "global"},
        "optimizer": {"lr": 7.5e-5, "betas": [0.0, 0.999]},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.guidance": PublishedSetting(
            2.05, CODE, "1 + tdm_weight * 3.5 of a guidance of 4.5", TEACHER_GUIDANCE
        ),
        "algorithm.fake_updates": PublishedSetting(1, CODE),
        "algorithm.fake_lr_factor": PublishedSetting(
            4.0, CODE, "learning_rate / 4 for the student"
        ),
        "algorithm.sigma.kind": PublishedSetting("uniform", CODE, "before the shift"),
        "algorithm.sigma.shift": PublishedSetting(3.0, CODE, "convert(tau_tmp_inv, s=3)"),
        "algorithm.sigma.max": PublishedSetting(1.0, CODE),
        "algorithm.reward_weight": PublishedSetting(0.7, SHARED, "1 - tdm_weight"),
        "algorithm.beta": PublishedSetting(
            10.0, OCR, "the same for HPS-v2; 1 for GenEval and ImageReward"
        ),
        "algorithm.clip_range": PublishedSetting(1e-3, SHARED, "2e-3 for ImageReward and HPS-v2"),
        "algorithm.teacher_weight": PublishedSetting(0.001, SHARED, "train.beta"),
        "algorithm.teacher_limit": PublishedSetting(0.05, SHARED, "reg_threshold"),
        "algorithm.surrogate_lr_factor": PublishedSetting(
            4.0, CODE, "learning_rate, four times the student's"
        ),
        "algorithm.surrogate_betas": PublishedSetting([0.9, 0.999], SHARED),
        "algorithm.surrogate_guidance": PublishedSetting(
            4.5, SHARED, "2.5 for GenEval, 3.5 for ImageReward and HPS-v2", TEACHER_GUIDANCE
        ),
        "algorithm.surrogate_sigma.kind": PublishedSetting("uniform", CODE, "before the shift"),
        "algorithm.surrogate_sigma.shift": PublishedSetting(3.0, CODE, "convert(..., s=3)"),
        "algorithm.surrogate_sigma.min": PublishedSetting(
            0.3,
            OCR,
            "300 of 1000 where it is trained and where it is asked; .55 and .25 to .4 for others",
        ),
        "algorithm.surrogate_sigma.max": PublishedSetting(1.0, CODE),
        "algorithm.surrogate_sigma.stratified": PublishedSetting(False, CODE, "a level each"),
        "algorithm.surrogate_old.warmup": PublishedSetting(1, CODE, "global_step is from 0"),
        "algorithm.surrogate_old.min_decay": PublishedSetting(0.001, SHARED),
        "algorithm.surrogate_old.slope": PublishedSetting(0.001, CODE),
        "algorithm.surrogate_old.max_decay": PublishedSetting(0.3, SHARED),
        "sampler.name": PublishedSetting("ode", SHARED, "sample.noise_level 0"),
        "sampler.steps": PublishedSetting(4, SHARED),
        "advantages.std": PublishedSetting("global", SHARED),
        "advantages.clip": PublishedSetting(5.0, CODE),
        "reference.weight": PublishedSetting(0.0, CODE),
        "optimizer.lr": PublishedSetting(
            7.5e-5, BASE, "train.learning_rate 3e-4 is the copies'; a fourth is the student's"
        ),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.betas": PublishedSetting([0.0, 0.999], SHARED),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(
            1, OCR, "gradient_accumulation_steps = num_batches_per_epoch"
        ),
        "group_size": PublishedSetting(24, SHARED, deviation=GROUP_SIZE),
        "pull of the fake score to the teacher": PublishedSetting(
            "0.02 * loss_reg_fake",
            CODE,
            deviation="the fake score is that of the student, and a pull biases it",
            ours="none",
        ),
    }

    name: Literal["tdm_r1"] = "tdm_r1"
    fake_updates: int = Field(1, ge=1)
    """Optimiser steps of the fake score before each optimiser step of the student, on the same
    samples with other noise.
    """
    fake_lr_factor: float = Field(4.0, gt=0)
    """Learning rate of the fake score, relative to the student's. The rest of its optimiser is the
    same."""
    sigma: SigmaConfig = SigmaConfig(kind="uniform", shift=3.0)
    """Distribution of the noise levels at which the loss compares the two scores and at which the
    fake score is trained. They lie above the end of the student's step."""
    reward_weight: float = Field(0.7, ge=0)
    """Weight of the surrogate reward in the student's gradient; that of TDM has 1."""
    beta: float = Field(10.0, gt=0)
    """Strength of the preference. The errors that it multiplies are means over the latent's
    elements.
    """
    clip_range: float = Field(1e-3, gt=0, lt=1)
    """Clip range of exp(d_old - d), where the errors d are means over the latent's elements."""
    teacher_weight: float = Field(0.001, ge=0)
    """Weight of the surrogate's distance to the teacher in its loss."""
    teacher_limit: float = Field(0.05, gt=0)
    """Distance to the teacher, as a mean over a group, above which the surrogate's rows lose the
    gradients that lead further away."""
    surrogate_lr_factor: float = Field(4.0, gt=0)
    """Learning rate of the surrogate, relative to the student's. But for its betas, the rest of its
    optimiser is the same."""
    surrogate_sigma: SigmaConfig = SigmaConfig(kind="uniform", shift=3.0, min=0.3, stratified=False)
    """Distribution of the noise levels at which the surrogate is trained and asked. They lie above
    the end of the student's step."""
    surrogate_old: EmaScheduleConfig = EmaScheduleConfig(
        warmup=1, min_decay=0.001, slope=0.001, max_decay=0.3
    )
    """The moving average of the surrogate, which its clip compares with. Steps are optimiser
    steps."""


def compute_surrogate_loss(rows: SurrogateRows, config: TDMR1Config) -> tuple[Tensor, RowMetrics]:
    """Compute the surrogate's loss and the metrics of each row, [M]."""
    # d, and sg d - d_teacher: below 0 where the surrogate predicts u better than the teacher does.
    error = mean_per_row((rows.velocity - rows.target) ** 2)
    change = error.detach() - mean_per_row((rows.teacher - rows.target) ** 2)
    # What a group still has to gain, sg sigmoid(S_g), the same at all of its rows.
    weight = compute_group_weight(change, rows.advantage, rows.group_index, config.beta)

    # A clipped row keeps its value and loses the gradient of d; the pull to the teacher stays.
    old_error = mean_per_row((rows.old - rows.target) ** 2)
    clipped = find_clipped_rows(error, old_error, rows.advantage, config.clip_range)
    distance = mean_per_row((rows.velocity - rows.teacher) ** 2)
    # Of the group, so that the rows of a micro-batch do not decide for each other.
    is_far = compute_group_mean(distance.detach(), rows.group_index) > config.teacher_limit
    stopped = is_far & (change < 0).where(rows.advantage > 0, change > 0)
    error = error.detach().where(clipped | stopped, error)

    loss = weight * rows.advantage * error + config.teacher_weight * distance
    # Early ends are far from the sample whose reward it is.
    return rows.step_share * loss, {
        "weight": weight,
        "change": change,
        "distance": distance,
        "clipped": clipped.float(),
        "stopped": stopped.float(),
    }


def compute_loss(rows: MatchingRows, config: TDMR1Config) -> tuple[Tensor, RowMetrics]:
    """Compute the student's loss and the metrics of each row, [M]."""
    assert rows.rewarded_clean is not None, "rows of a SurrogateConfig have these predictions"
    assert rows.base_clean is not None
    matching, matching_distance = compute_gradient(rows)
    clean = rows.predicted_clean

    # (x0_teacher - x0_surrogate) / mean|x0_hat - x0_surrogate|: where the surrogate has moved to,
    # in steps of about the same length for every sample.
    distance = mean_per_row((clean.detach() - rows.rewarded_clean).abs()).clamp_min(TINY)
    reward = (rows.base_clean - rows.rewarded_clean) / expand_like(distance, clean)
    # Against the gradient of a loss: minus g is where the sample goes.
    direction = matching + config.reward_weight * reward
    total = mean_per_row((clean - (clean.detach() - direction)) ** 2) / 2
    return total, {
        "matching/distance": matching_distance,
        "matching/gradient": mean_per_row(matching.abs()),
        "matching/reward_gradient": mean_per_row(reward.abs()),
    }


ALGORITHM = Algorithm(
    TDMR1Config,
    compute_loss,
    copies=lambda config: frozenset({"teacher", "fake"}),
    # Groups whose rewards say nothing still match the teacher's distribution.
    select=select_all_groups,
    surrogate_loss=compute_surrogate_loss,
)
