r"""CRD (2603.14128): regress the change against a moving reference on the advantage, both centred
inside the group of a prompt.

    w = sg max(mean|v - u|, 1e-5),   w_old likewise,   u = eps - x0
    r = -[mean((v - u)^2) / w - mean((v_old - u)^2) / w_old]
    L = (c / beta) mean((beta (r - mean_group r) - (A - mean_group A) / (2 c))^2)

c is ``advantages.clip``, 5 by default. A lies within +-c, and A / (2 c) within +-1/2. That scale
matters: r is at most mean((v_old - u)^2) / w_old, about 1.

Two copies follow the policy, each by its own schedule: ``old``, the moving reference of r, and
``sampling``, which generates. The penalty is the stage's ``reference``: towards the base model
under classifier-free guidance, and heavier for better samples.

Sources: for the idea the paper's abstract; for formulas and numbers its port in Flow-Factory
(trainers/crd.py) and that port's settings for SD3.5-medium and OCR, which it says are those of the
paper's table 3. Deviations from the port:

- It centres over the rows that all GPUs have at a time, whichever prompts they are of; here each
  prompt's group is centred by itself, as in the paper. (Its mean of r takes no gradient. Here it
  may: the misses of a group add up to 0, so nothing changes.)
- It counts optimiser steps in the two schedules and lets the copies follow once a rollout step, of
  two optimiser steps. Here both count rollout steps, so the defaults have twice its slopes and half
  its warm-up, 37 for 37.5. With ``updates_per_step: 1`` set its own numbers: ``old: {min_decay:
  .25, slope: .005, max_decay: .999}``, ``sampling: {warmup: 75, slope: .0075, max_decay: .999}``.
- It trains on groups without a spread, towards equal r; here they are dropped, as for every
  algorithm.
- In an offline stage both copies stay as they are, and become copies of the policy at its end.
- It shares its draws of sigma over the whole batch, here inside a group.
- Left out: a binary cross-entropy in place of the square, and softmax weights in place of the
  group's mean (both off by default).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import (
    Algorithm,
    ForwardRows,
    RowMetrics,
    compute_group_mean,
    mean_per_row,
    select_groups,
)
from ebbflow.recipe.algorithms import (
    GROUP_SIZE,
    SUM_OF_REWARDS,
    EmaScheduleConfig,
    ForwardConfig,
    PublishedSetting,
    SigmaConfig,
)

if TYPE_CHECKING:
    from torch import Tensor


CRD = "X-GenGroup/Flow-Factory examples/crd/lora/sd3_5/default.yaml"
STEPS = "there {} an optimiser step; here by rollout steps, of 2 optimiser steps each"


class CRDConfig(ForwardConfig):
    """Regression of the change against a moving reference on the advantage, both centred inside the
    group.
    """

    paper: ClassVar = "2603.14128"
    shared_noise: ClassVar = False
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 10},
        "reference": {"weight": 0.1, "guidance": 4.5, "adaptive": True},
        "updates_per_step": 2,
    }
    published: ClassVar = {
        "algorithm.beta": PublishedSetting(1.0, CRD, "crd_beta"),
        "algorithm.noise_levels": PublishedSetting(20, CRD, "num_train_timesteps"),
        "algorithm.sigma.kind": PublishedSetting(
            "schedule", CRD, "discrete: one of each run of the sampler's sigmas"
        ),
        "algorithm.sigma.min": PublishedSetting(
            0.2, CRD, "its rounding down leaves out the last of 10"
        ),
        "algorithm.old.warmup": PublishedSetting(0, CRD, "old_model_decay"),
        "algorithm.old.min_decay": PublishedSetting(0.25, CRD),
        "algorithm.old.slope": PublishedSetting(0.01, CRD, STEPS.format("0.005")),
        "algorithm.old.max_decay": PublishedSetting(0.999, CRD),
        "algorithm.sampling.warmup": PublishedSetting(
            37.5,
            CRD,
            "there 75 optimiser steps; here rollout steps, of 2 optimiser steps each",
            "a schedule begins with a whole rollout step",
        ),
        "algorithm.sampling.min_decay": PublishedSetting(0.0, CRD),
        "algorithm.sampling.slope": PublishedSetting(0.015, CRD, STEPS.format("0.0075")),
        "algorithm.sampling.max_decay": PublishedSetting(0.999, CRD),
        "sampler.name": PublishedSetting("ode", CRD),
        "sampler.steps": PublishedSetting(10, CRD),
        "advantages.std": PublishedSetting("global", CRD),
        "advantages.combine": PublishedSetting("sum", CRD, deviation=SUM_OF_REWARDS),
        "advantages.clip": PublishedSetting(5.0, CRD),
        "reference.weight": PublishedSetting(0.1, CRD, "kl_beta"),
        "reference.guidance": PublishedSetting(4.5, CRD, "kl_cfg"),
        "reference.adaptive": PublishedSetting(True, CRD, "reward_adaptive_kl"),
        "reference.penalty": PublishedSetting("velocity", CRD, "kl_type v-based"),
        "optimizer.lr": PublishedSetting(3e-4, CRD, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, CRD),
        "optimizer.max_grad_norm": PublishedSetting(1.0, CRD),
        "updates_per_step": PublishedSetting(2, CRD, "gradient_step_per_epoch"),
        "group_size": PublishedSetting(24, CRD, deviation=GROUP_SIZE),
    }

    name: Literal["crd"] = "crd"
    noise_levels: int = Field(20, ge=1)
    """Number of (sigma, noise) samples per latent and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="schedule", min=0.2)
    """Distribution of the sigmas. Published: the first nine of 10 steps with shift 3, from 1 to
    .28.
    """
    beta: float = Field(1.0, gt=0)
    """Scale of the implied reward."""
    old: EmaScheduleConfig = EmaScheduleConfig(min_decay=0.25, slope=0.01, max_decay=0.999)
    """The moving reference in an online stage. In an offline stage the reference does not move."""
    sampling: EmaScheduleConfig = EmaScheduleConfig(warmup=37, slope=0.015, max_decay=0.999)
    """The copy that generates rollouts in an online stage. In an offline stage it does not move."""


def compute_loss(rows: ForwardRows, config: CRDConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # r, the implied reward: by how much the policy predicts u better than the moving reference.
    error = _compute_weighted_error(rows, rows.velocity)
    old_error = _compute_weighted_error(rows, rows.copies["old"])
    implied = -(error - old_error)

    # Both sides are centred in the group of a prompt and noise level. So an unknown constant of the
    # prompt (the partition function of its optimal policy) cancels, and needs no estimate.
    target = _subtract_group_mean(rows.advantage, rows.group_index) / (2 * rows.advantage_clip)
    miss = config.beta * _subtract_group_mean(implied, rows.group_index) - target
    metrics = {
        "crd/implied": implied,
        "crd/miss": miss.abs(),
        "crd/agreement": (implied * target > 0).float(),
    }
    return rows.advantage_clip / config.beta * miss**2, metrics


def _compute_weighted_error(rows: ForwardRows, velocity: Tensor) -> Tensor:
    """Compute mean((v - u)^2) / sg max(mean|v - u|, 1e-5), [M]."""
    # A square over a magnitude without gradient: it grows like |v - u|, so that rows with a large
    # error do not outweigh the others.
    error = velocity - (rows.noise - rows.clean)
    return mean_per_row(error**2) / mean_per_row(error.detach().abs()).clamp_min(1e-5)


def _subtract_group_mean(values: Tensor, group_index: Tensor) -> Tensor:
    return values - compute_group_mean(values, group_index)


ALGORITHM = Algorithm(
    CRDConfig,
    compute_loss,
    copies=lambda config: frozenset({"old"}),
    select=select_groups,
    follows={
        "old": lambda config, step: config.old.decay_after_step(step),
        "sampling": lambda config, step: config.sampling.decay_after_step(step),
    },
    generates="sampling",
)
