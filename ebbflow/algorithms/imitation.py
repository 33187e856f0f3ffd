"""What the losses that imitate samples share: settings, and their source in Flow-GRPO's code."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ebbflow.recipe.algorithms import ForwardConfig, Published, SigmaConfig

SFT = "yifan123/flow_grpo config/sft.py pickscore_sd3"
SCRIPT = "yifan123/flow_grpo scripts/train_sd3_sft.py"
BASE = "yifan123/flow_grpo config/base.py"


class ImitationConfig(ForwardConfig):
    """Flow matching on generated samples."""

    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde", "steps": 40}, "updates_per_step": 1}
    published: ClassVar = {
        "algorithm.noise_levels": Published(39, SCRIPT, "int(.99 * 40), all in one update"),
        "algorithm.sigma.kind": Published("logit_normal", SCRIPT),
        "algorithm.sigma.shift": Published(3.0, SCRIPT, "of SD3's scheduler"),
        "sampler.name": Published("flow_sde", SFT, "eta .7, though no log-prob is used"),
        "sampler.steps": Published(40, SFT),
        "reference.weight": Published(0.0, SFT),
        "optimizer.lr": Published(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": Published(1e-4, BASE),
        "optimizer.max_grad_norm": Published(1.0, BASE),
        "updates_per_step": Published(1, "yifan123/flow_grpo config/sft.py geneval_sd3"),
    }

    noise_levels: int = Field(39, ge=1)
    """Draws of (sigma, noise) per sample and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="logit_normal", shift=3.0)
    """As SD3 was trained, and as Flow-GRPO's code has it."""
