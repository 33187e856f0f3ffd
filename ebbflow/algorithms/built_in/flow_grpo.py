r"""Flow-GRPO (2505.05470), and by their windows and samplers Flow-GRPO-Fast, MixGRPO (2507.21802)
and DanceGRPO (2505.07818).

    rho = exp(log_prob - old_log_prob)
    L   = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

over the rows, one per (sample, trained step); MixGRPO's division by the window length is this mean.
Log-probs are means over the D elements of a latent, so rho stays close to 1 and eps follows
1/sqrt(D). What tells the four apart are defaults of the stage: which steps are stochastic and
trained, the sampler, the standard deviation of the advantages, the reference penalty.

Deviations: the trained steps are one draw for all samples of an optimisation step. DanceGRPO's code
draws a permutation of them for each sample; a window of its own for each sample, which public code
has too, made training collapse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows
from ebbflow.algorithms.loss_terms import (
    BASE,
    compute_clipped_loss,
    compute_ratio_metrics,
    published_flow_grpo_settings,
)
from ebbflow.recipe.algorithms import GROUP_SIZE, PublishedSetting, TrajectoryConfig

if TYPE_CHECKING:
    from torch import Tensor


GRPO = "yifan123/flow_grpo config/grpo.py general_ocr_sd3"
FAST = "yifan123/flow_grpo config/grpo.py pickscore_sd3_fast"
MIX = "Tencent-Hunyuan/MixGRPO scripts/finetune/finetune_flux_grpo_MixGRPO.sh"
DANCE = "XueZeyue/DanceGRPO scripts/finetune/finetune_flux_grpo.sh"


class ClippedConfig(TrajectoryConfig):
    """Policy gradients with a clipped ratio."""

    clip_range: float = Field(1e-4, gt=0, lt=1)
    """Clip range of the ratio. Log-probs are means over the latent's elements, so a model with
    fewer elements needs a wider range.
    """

    def ratio_range(self, dims: int) -> float:
        return self.clip_range


class FlowGRPOConfig(ClippedConfig):
    """Clipped policy gradient on every stochastic denoising step."""

    paper: ClassVar = "2505.05470"
    stage_defaults: ClassVar = {
        "sampler": {"name": "flow_sde", "steps": 10},
        "window": {"kind": "all"},
        "reference": {"weight": 0.04, "penalty": "kl_without_dt"},
        "updates_per_step": 2,
    }
    published: ClassVar = published_flow_grpo_settings(GRPO) | {
        "algorithm.clip_range": PublishedSetting(1e-4, BASE),
        "reference.weight": PublishedSetting(
            0.04, GRPO, "the same for GenEval; .01 for PickScore, 0 for FLUX"
        ),
        "reference.penalty": PublishedSetting(
            "kl_without_dt", "yifan123/flow_grpo scripts/train_sd3.py"
        ),
        "sampler.steps": PublishedSetting(10, GRPO, "6 for FLUX, with eta .9"),
        "window.kind": PublishedSetting(
            "all", GRPO, "timestep_fraction .99: every step but the last"
        ),
    }

    name: Literal["flow_grpo"] = "flow_grpo"


class FlowGRPOFastConfig(ClippedConfig):
    """Flow-GRPO on a short window that starts anew at random in the first half; no reference
    penalty.
    """

    paper: ClassVar = "2505.05470"
    stage_defaults: ClassVar = {
        "sampler": {"name": "flow_sde", "steps": 10, "eta": 0.8},
        "window": {"kind": "random", "size": 2, "limit": 0.4},
        "updates_per_step": 2,
    }
    published: ClassVar = published_flow_grpo_settings(FAST) | {
        "algorithm.clip_range": PublishedSetting(1e-5, FAST),
        "reference.weight": PublishedSetting(0.0, FAST),
        "sampler.name": PublishedSetting(
            "flow_sde", FAST, "cps in pickscore_sd3_fast_nocfg and in those for FLUX"
        ),
        "sampler.steps": PublishedSetting(10, FAST, "6 for FLUX"),
        "sampler.eta": PublishedSetting(0.8, FAST, "1.2 for Qwen-Image"),
        "window.kind": PublishedSetting("random", FAST),
        "window.size": PublishedSetting(2, FAST, "3 in pickscore_sd3_fast_nocfg and for FLUX"),
        "window.limit": PublishedSetting(
            0.4,
            "yifan123/flow_grpo config/grpo.py pickscore_qwenimage",
            "windows lie in the first half: of 10 steps, those of 2 start at 0 to 3, those of 3"
            " with .3 at 0 to 2",
        ),
    }

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"
    clip_range: float = Field(1e-5, gt=0, lt=1)
    """Clip range of the ratio. Log-probs are means over the latent's elements, so a model with
    fewer elements needs a wider range.
    """


class MixGRPOConfig(ClippedConfig):
    """Flow-GRPO on a window that moves from the first steps on; the steps outside are
    deterministic.
    """

    paper: ClassVar = "2507.21802"
    stage_defaults: ClassVar = {
        "shared_initial_noise": True,
        "sampler": {"name": "flow_sde", "steps": 25},
        "window": {"kind": "progressive", "size": 4, "limit": 1.0, "steps_per_window": 25},
        "advantages": {"std": "group"},
        "optimizer": {"lr": 1e-5},
        "updates_per_step": 4,
    }
    published: ClassVar = {
        "algorithm.clip_range": PublishedSetting(1e-4, MIX),
        "sampler.name": PublishedSetting("flow_sde", MIX, "--flow_grpo_sampling, eta .7"),
        "sampler.steps": PublishedSetting(25, MIX),
        "shared_initial_noise": PublishedSetting(True, MIX, "--init_same_noise"),
        "window.kind": PublishedSetting("progressive", MIX),
        "window.size": PublishedSetting(4, MIX),
        "window.stride": PublishedSetting(1, MIX),
        "window.limit": PublishedSetting(
            1.0,
            MIX,
            "all starts; published windows also shrink over the last steps, while the last one here"
            " has all its steps",
        ),
        "window.steps_per_window": PublishedSetting(25, MIX, "20 in MixGRPO_Flash*.sh"),
        "window.roll_over": PublishedSetting(True, MIX),
        "window.tail": PublishedSetting(
            None, MIX, ".4 in MixGRPO_Flash.sh; .2 in MixGRPO_Flash*.sh, with a fixed window"
        ),
        "advantages.std": PublishedSetting("group", MIX),
        "advantages.combine": PublishedSetting(
            "per_reward", MIX, "multi_reward_mix advantage_aggr"
        ),
        "advantages.clip": PublishedSetting(5.0, MIX),
        "reference.weight": PublishedSetting(0.0, MIX),
        "optimizer.lr": PublishedSetting(1e-5, MIX, "of all parameters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, MIX),
        "optimizer.max_grad_norm": PublishedSetting(1.0, MIX),
        "updates_per_step": PublishedSetting(
            4, MIX, "12 samples of a prompt on each GPU, 3 of them an update"
        ),
        "group_size": PublishedSetting(12, MIX, deviation=GROUP_SIZE),
    }

    name: Literal["mix_grpo"] = "mix_grpo"


class DanceGRPOConfig(ClippedConfig):
    """Clipped policy gradient on Dance-SDE: each group by its own standard deviation, a random
    share of the steps.
    """

    paper: ClassVar = "2505.07818"
    stage_defaults: ClassVar = {
        "shared_initial_noise": True,
        "sampler": {"name": "dance_sde", "steps": 16},
        "window": {"kind": "share", "share": 0.6},
        "advantages": {"std": "group"},
        "optimizer": {"lr": 1e-5},
        "updates_per_step": 3,
    }
    published: ClassVar = {
        "algorithm.clip_range": PublishedSetting(1e-4, DANCE),
        "sampler.name": PublishedSetting("dance_sde", DANCE, "eta .3; .25 for HunyuanVideo"),
        "sampler.steps": PublishedSetting(
            16, DANCE, "20 for Qwen-Image and Wan2.1, 12 for the LoRA"
        ),
        "shared_initial_noise": PublishedSetting(True, DANCE, "--init_same_noise"),
        "window.kind": PublishedSetting(
            "share", DANCE, "--ignore_last: the last step is never trained"
        ),
        "window.share": PublishedSetting(0.6, DANCE, "rounded down"),
        "which steps are trained": PublishedSetting(
            "drawn for each sample",
            "XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py",
            deviation=(
                "only steps that are trained are stored, and all samples of a batch have the same"
                " ones"
            ),
            ours="drawn once a rollout step, for all samples",
        ),
        "advantages.std": PublishedSetting("group", DANCE, "--use_group"),
        "advantages.combine": PublishedSetting(
            "per_reward",
            "XueZeyue/DanceGRPO fastvideo/train_grpo_hunyuan.py",
            "advantages of two rewards, added with weights",
        ),
        "advantages.clip": PublishedSetting(5.0, DANCE),
        "reference.weight": PublishedSetting(0.0, DANCE),
        "optimizer.lr": PublishedSetting(
            1e-5, DANCE, "of all parameters; 3e-4 in finetune_flux_grpo_8gpus_lora.sh"
        ),
        "optimizer.weight_decay": PublishedSetting(1e-4, DANCE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, DANCE),
        "updates_per_step": PublishedSetting(
            3, DANCE, "12 samples of a prompt on each GPU, 4 of them an update"
        ),
        "group_size": PublishedSetting(
            12,
            DANCE,
            "24 for HunyuanVideo, trained on the 4 best and the 4 worst",
            deviation=GROUP_SIZE,
        ),
    }

    name: Literal["dance_grpo"] = "dance_grpo"


def compute_loss(rows: TrajectoryRows, config: ClippedConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # rho = exp(log_prob - old_log_prob). Both are means over D elements, so rho is the ratio of the
    # densities to the power 1 / D.
    ratio = (rows.log_prob - rows.old_log_prob).exp()

    # max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), one row per (sample, trained step).
    loss, clip_metrics = compute_clipped_loss(ratio, rows.advantage, config.clip_range)
    return loss, compute_ratio_metrics(rows) | clip_metrics


# Four names for one loss: each brings the stage's defaults of its paper.
FLOW_GRPO = Algorithm(FlowGRPOConfig, compute_loss)
FLOW_GRPO_FAST = Algorithm(FlowGRPOFastConfig, compute_loss)
MIX_GRPO = Algorithm(MixGRPOConfig, compute_loss)
DANCE_GRPO = Algorithm(DanceGRPOConfig, compute_loss)
