r"""Advantage-weighted matching (2509.25050): the flow-matching error stands in for the
log-probability of a whole sample.

    l   = mean((v - u)^2),   u = eps - x0
    s   = -(sigma / q) ((l + 1e-10)^q - (1e-10)^q)     (also -l, -sigma l, -sigma^2 l)
    rho = exp(s - s_rollout)
    L   = mean max(-A' rho, -A' clip(rho, 1 - eps, 1 + eps)) + w mean((v - v_old)^2)

s is the surrogate log-prob, s_rollout that of the rollout's policy at the same sigma and eps, and
A' = A / advantages.clip.

The rollout's policy is the one before the first update on the samples, as in the published code: of
a step online, of the stage offline. In the first update rho is 1 and its gradient that of s. v_old
is the published EMA, a copy that follows closely: min(.3, .001 n). Without the reference penalty
the policy drifts far from the base while the training reward still rises.
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
    mean_per_row,
)
from ebbflow.algorithms.loss_terms import compute_clipped_loss
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

# Inside the power, whose slope is infinite at an error of 0 (q < 1); subtracted again outside, so
# that no error has the surrogate 0.
TINY = 1e-10


REPOSITORY = "scxue/advantage_weighted_matching advantage_weighted_matching/"
AWM = f"{REPOSITORY}config/dgx_awm.py geneval_sd3_no_cfg_1node"
BASE = f"{REPOSITORY}config/base_awm.py"


class AWMConfig(ForwardConfig):
    """Advantage-weighted matching: the flow-matching loss of each sample, weighted with its
    advantage, near a lagging copy.
    """

    paper: ClassVar = "2509.25050"
    stage_defaults: ClassVar = {
        "sampler": {"name": "dpm_solver", "steps": 14},
        "reference": {"weight": 0.001},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.surrogate": PublishedSetting("power", AWM, "weighting ghuber"),
        "algorithm.power": PublishedSetting(0.25, AWM),
        "algorithm.noise_levels": PublishedSetting(6, AWM, "train_timesteps"),
        "algorithm.clip_range": PublishedSetting(1.0, AWM),
        "algorithm.sigma.kind": PublishedSetting(
            "schedule", AWM, "time_type discrete: one of each run of the sampler's sigmas"
        ),
        "algorithm.sigma.min": PublishedSetting(0.35, AWM, "all of 14 but the last two"),
        "algorithm.sigma.max": PublishedSetting(0.99, AWM, "all but the first; 1 for PickScore"),
        "algorithm.old_weight": PublishedSetting(1.0, AWM, "ema_beta"),
        "algorithm.old.warmup": PublishedSetting(0, AWM),
        "algorithm.old.slope": PublishedSetting(
            0.001, f"{REPOSITORY}scripts/train_sd3_awm.py", "kl_ema_decay_type linear"
        ),
        "algorithm.old.max_decay": PublishedSetting(0.3, AWM),
        "sampler.name": PublishedSetting(
            "SA-Solver",
            AWM,
            "its noise is .4 for sigma in .3 to .9, and 0 for PickScore",
            deviation=(
                "there is none here; without noise it is a deterministic solver of second order, as"
                " dpm_solver is"
            ),
        ),
        "sampler.steps": PublishedSetting(14, AWM),
        "advantages.std": PublishedSetting("global", AWM),
        "advantages.combine": PublishedSetting(
            "sum", f"{REPOSITORY}flow_grpo/rewards.py", deviation=SUM_OF_REWARDS
        ),
        "advantages.clip": PublishedSetting(5.0, BASE),
        "reference.weight": PublishedSetting(0.001, AWM, ".003 for OCR, .0001 for PickScore"),
        "reference.penalty": PublishedSetting("velocity", AWM, "kl_weight Uniform"),
        "optimizer.lr": PublishedSetting(3e-4, AWM, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(1, AWM, "gradients of the whole batch are added up"),
        "group_size": PublishedSetting(24, AWM, deviation=GROUP_SIZE),
    }

    name: Literal["awm"] = "awm"
    noise_levels: int = Field(6, ge=1)
    """Number of (sigma, noise) samples per latent and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="schedule", min=0.35, max=0.99)
    """Distribution of the sigmas. Published: with 14 steps and shift 3, the sigmas from .97 to .36
    are split into runs, and each run gives one. For PickScore they start at 1 (``max: 1``).
    """
    surrogate: Literal["power", "plain", "sigma", "sigma_squared"] = "power"
    """Surrogate of the log-prob, for a flow-matching error l: ``power`` is -(sigma / q) ((l +
    1e-10)^q - (1e-10)^q), ``plain`` is -l, ``sigma`` is -sigma l, and ``sigma_squared`` is -sigma^2
    l.
    """
    power: float = Field(0.25, gt=0, le=1)
    """Exponent q of the ``power`` surrogate."""
    clip_range: float = Field(1.0, gt=0)
    """Clip range eps of the ratio."""
    old_weight: float = Field(1.0, ge=0)
    """Weight of the penalty mean((v - v_old)^2). The paper calls the old copy the EMA."""
    old: EmaScheduleConfig = EmaScheduleConfig(slope=0.001, max_decay=0.3)


def compute_loss(rows: ForwardRows, config: AWMConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # l = mean((v - u)^2) of the policy, and of the policy that the rollouts come from.
    error = compute_flow_matching_error(rows, rows.velocity)
    rollout_error = compute_flow_matching_error(rows, rows.copies["rollout"])

    # rho = exp(s - s_rollout). No weight has moved before the first update: there the two errors
    # are the same numbers and rho is exactly 1, with the gradient of s.
    surrogate = compute_surrogate(error, rows.sigma, config)
    rollout_surrogate = compute_surrogate(rollout_error, rows.sigma, config)
    ratio = (surrogate - rollout_surrogate).exp()

    # max(-A' rho, -A' clip(rho, 1 - eps, 1 + eps)) with A' = A / c in [-1, 1]: the published code
    # divides by its clip, so the weight of the penalties is relative to that.
    advantage = rows.advantage / rows.advantage_clip
    total, clip_metrics = compute_clipped_loss(ratio, advantage, config.clip_range)
    metrics = {"awm/error": error, "awm/ratio": ratio, **clip_metrics}

    # + w mean((v - v_old)^2). With w = 0 there is no old copy (list_copies), which saves the
    # memory of its parameters and a pass over the rows.
    if config.old_weight > 0:
        deviation = mean_per_row((rows.velocity - rows.copies["old"]) ** 2)
        total = total + config.old_weight * deviation
        metrics["awm/old_deviation"] = deviation
    return total, metrics


def compute_surrogate(error: Tensor, sigma: Tensor, config: AWMConfig) -> Tensor:
    """Compute s of each row, [M], from its flow-matching error, [M]."""
    if config.surrogate == "power":
        power: Tensor = (error + TINY) ** config.power - TINY**config.power
        return -sigma / config.power * power
    return -error * sigma ** {"plain": 0, "sigma": 1, "sigma_squared": 2}[config.surrogate]


def list_copies(config: AWMConfig) -> frozenset[CopyName]:
    """List the copies whose predictions the loss needs."""
    return frozenset({"rollout", "old"} if config.old_weight > 0 else {"rollout"})


ALGORITHM = Algorithm(
    AWMConfig,
    compute_loss,
    copies=list_copies,
    follows={"old": lambda config, step: config.old.decay_after_step(step)},
)
