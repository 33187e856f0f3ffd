r"""DiffusionNFT (2509.16117): contrast an implicit better with an implicit worse policy, on the
forward process alone.

    p   = clip(A / (2 c) + 1/2, 0, 1)       A is clamped to +-c, c = advantages.clip: 5 by default
    v+  = beta v + (1 - beta) v_old,        v- = (1 + beta) v_old - beta v
    x0+- = x_sigma - sigma v+-,             w+- = sg max(mean|x0+- - x0|, 1e-5)
    l+- = mean((x0+- - x0)^2) / w+-
    L   = c mean[(p l+ + (1 - p) l-) / beta]

It needs the final latents and the reward, no trajectory and no log-probability, so any sampler may
generate them. They come from the OLD policy, which is part of the policy folder.

Deviations: online, the old policy follows after every rollout step, its epoch; offline it stays
fixed through the stage. Published code adds the penalty k mean((v - v_ref)^2), k = 1e-4: the
stage's ``reference``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, expand_like, mean_per_row
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


NFT = "NVlabs/DiffusionNFT config/nft.py sd3_pickscore"
BASE = "NVlabs/DiffusionNFT config/base.py"
DECAY = "NVlabs/DiffusionNFT scripts/train_nft_sd3.py return_decay, decay_type 1"


class DiffusionNFTConfig(ForwardConfig):
    """Contrast of an implicit better with an implicit worse policy, both around the old one that
    generates.
    """

    paper: ClassVar = "2509.16117"
    stage_defaults: ClassVar = {
        "sampler": {"name": "dpm_solver", "steps": 10},
        "reference": {"weight": 1e-4},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.beta": PublishedSetting(
            1.0, NFT, "the same for GenEval and HPS; .1 for OCR and for several rewards"
        ),
        "algorithm.advantages": PublishedSetting("all", NFT),
        "algorithm.noise_levels": PublishedSetting(
            9, BASE, "timestep_fraction .99 of 10 steps: every sigma of the rollout but the last"
        ),
        "algorithm.sigma.kind": PublishedSetting(
            "schedule", "NVlabs/DiffusionNFT scripts/train_nft_sd3.py"
        ),
        "algorithm.sigma.stratified": PublishedSetting(
            False, "NVlabs/DiffusionNFT scripts/train_nft_sd3.py", "a random order"
        ),
        "algorithm.old.warmup": PublishedSetting(
            0, DECAY, "OCR has decay_type 2: {warmup: 75, slope: .0075, max_decay: .999}"
        ),
        "algorithm.old.slope": PublishedSetting(
            0.001,
            DECAY,
            "published steps are optimiser steps: for OCR, with 2 of them in a rollout step,"
            " {warmup: 37, slope: .015}",
        ),
        "algorithm.old.max_decay": PublishedSetting(0.5, DECAY),
        "sampler.name": PublishedSetting("dpm_solver", NFT, "dpm2"),
        "sampler.steps": PublishedSetting(10, NFT, "25 for several rewards"),
        "advantages.std": PublishedSetting("global", BASE),
        "advantages.combine": PublishedSetting(
            "sum", "NVlabs/DiffusionNFT flow_grpo/rewards.py", deviation=SUM_OF_REWARDS
        ),
        "advantages.clip": PublishedSetting(5.0, BASE),
        "reference.weight": PublishedSetting(1e-4, NFT),
        "reference.penalty": PublishedSetting(
            "velocity", "NVlabs/DiffusionNFT scripts/train_nft_sd3.py"
        ),
        "optimizer.lr": PublishedSetting(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(1, NFT, "2 for OCR"),
        "group_size": PublishedSetting(24, NFT, deviation=GROUP_SIZE),
    }

    name: Literal["diffusion_nft"] = "diffusion_nft"
    noise_levels: int = Field(9, ge=1)
    """Number of (sigma, noise) samples per latent and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="schedule", stratified=False)
    """Distribution of the sigmas. Published: 9 of the sampler's 10 sigmas, in a random order for
    each sample.
    """
    beta: float = Field(1.0, gt=0, le=1)
    """Distance of the implicit policies from the old policy. Published: 1, and .1 for OCR or
    several rewards.
    """
    advantages: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Transformation of the advantages. ``all``: none. ``positive_only`` and ``negative_only``: the
    others become 0. ``one_only``: 1 above zero and 0 elsewhere. ``binary``: their sign.
    """
    old: EmaScheduleConfig = EmaScheduleConfig(slope=0.001, max_decay=0.5)
    """The old policy, which generates rollouts. In an online stage it follows the policy, in
    rollout steps; in an offline stage it does not move. Published code counts gradient steps. It
    also has ``{max_decay: 0}`` (a plain copy), and for OCR a warmup of 75 and a slope of .0075 with
    2 gradient steps per rollout step, which is ``{warmup: 37, slope: .015, max_decay: .999}`` here.
    """


def compute_loss(rows: ForwardRows, config: DiffusionNFTConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # p = clip(A / (2 c) + 1/2, 0, 1), the paper's optimality probability: 1/2 for an average
    # sample.
    advantage = shape_advantage(rows.advantage, config)
    preference = (advantage / (2 * rows.advantage_clip) + 0.5).clamp(0, 1)

    # v+ and v-: the old policy moved towards the new one and as far away from it. At v = v_old both
    # are v_old, l+ = l-, and the gradient is 2 p - 1 times that of l: 0 for an average sample.
    old = rows.copies["old"]
    better = config.beta * rows.velocity + (1 - config.beta) * old
    worse = (1 + config.beta) * old - config.beta * rows.velocity

    # l+ and l-, and L = c (p l+ + (1 - p) l-) / beta. The division makes the gradient at v_old the
    # same for every beta.
    better_error = _compute_weighted_error(rows, better)
    worse_error = _compute_weighted_error(rows, worse)
    metrics = {
        "nft/better_error": better_error,
        "nft/worse_error": worse_error,
        "nft/old_deviation": mean_per_row((rows.velocity - old) ** 2),
    }
    contrast = preference * better_error + (1 - preference) * worse_error
    return rows.advantage_clip * contrast / config.beta, metrics


def shape_advantage(advantage: Tensor, config: DiffusionNFTConfig) -> Tensor:
    """Apply the mode ``config.advantages`` to advantages, [M]."""
    modes = {
        "all": advantage,
        "positive_only": advantage.clamp_min(0),
        "negative_only": advantage.clamp_max(0),
        "one_only": (advantage > 0).to(advantage),
        "binary": advantage.sign(),
    }
    return modes[config.advantages]


def _compute_weighted_error(rows: ForwardRows, velocity: Tensor) -> Tensor:
    """Compute l of one implicit policy, [M]."""
    # x0+- - x0 = x_sigma - sigma v - x0 = sigma (eps - x0 - v): without the subtraction of x_sigma,
    # which would cancel digits at small sigmas.
    error = expand_like(rows.sigma, velocity) * (rows.noise - rows.clean - velocity)
    weight = mean_per_row(error.detach().abs()).clamp_min(1e-5)
    return mean_per_row(error**2) / weight


ALGORITHM = Algorithm(
    DiffusionNFTConfig,
    compute_loss,
    copies=lambda config: frozenset({"old"}),
    follows={"old": lambda config, step: config.old.decay_after_step(step)},
    generates="old",
)
