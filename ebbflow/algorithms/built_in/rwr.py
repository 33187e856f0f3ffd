r"""Reward-weighted regression (2302.12192): L = mean[exp(A / temperature) mean((v - u)^2)], u = eps - x0.

Every sample is imitated, the better the more. The advantage, centred in its group and clamped, stands in for the raw reward, so
that hard prompts count as much as easy ones.

Deviations: the paper weighs with the reward itself, not with its exponential, and adds the pretraining loss on real images, which
the stage's ``reference`` stands in for if it has a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, ForwardRows, RowMetrics, flow_matching_error
from ebbflow.recipe.algorithms import ForwardConfig, Published, SigmaConfig

if TYPE_CHECKING:
    from torch import Tensor


SFT = "yifan123/flow_grpo config/sft.py pickscore_sd3"
BASE = "yifan123/flow_grpo config/base.py"


class RWRConfig(ForwardConfig):
    """Flow matching on every sample, weighted with exp(advantage / temperature)."""

    paper: ClassVar = "2302.12192"
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde", "steps": 40}, "updates_per_step": 1}
    published: ClassVar = {
        "algorithm.temperature": Published(
            "none",
            "2302.12192",
            "the same in yifan123/flow_grpo flow_grpo/stat_tracking.py, type rwr",
            deviation="published weights are the rewards themselves, which must not be negative; exp(A / temperature) takes any",
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
    }

    name: Literal["rwr"] = "rwr"
    noise_levels: int = Field(39, ge=1)
    """Draws of (sigma, noise) per sample and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="logit_normal", shift=3.0)
    """As SD3 was trained, and as Flow-GRPO's code has it."""
    temperature: float = Field(1.0, gt=0)


def loss(rows: ForwardRows, config: RWRConfig) -> tuple[Tensor, RowMetrics]:
    """Loss and metrics of each row, [M]."""
    weight = (rows.advantage / config.temperature).exp()
    return weight * flow_matching_error(rows, rows.velocity), {"rwr/weight": weight}


ALGORITHM = Algorithm(RWRConfig, loss)
