"""What the losses that imitate samples share: settings, and their source in Flow-GRPO's code."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ebbflow.recipe.algorithms import ForwardConfig, PublishedSetting, SigmaConfig

SFT = "yifan123/flow_grpo config/sft.py pickscore_sd3"
SCRIPT = "yifan123/flow_grpo scripts/train_sd3_sft.py"
BASE = "yifan123/flow_grpo config/base.py"
ON_DATA = "huggingface/diffusers examples/dreambooth/train_dreambooth_lora_qwen_image.py"


class ImitationConfig(ForwardConfig):
    """Flow matching on generated samples, or on captioned data."""

    imitates: ClassVar = True
    # On data, as diffusers' training scripts: one draw for each picture and pass, from the 1,000
    # noise levels of the family's own schedule. Pictures come back in every epoch, while the 39
    # draws above are all that a generated sample gets.
    data_defaults: ClassVar = {
        "algorithm": {"noise_levels": 1, "sigma": {"kind": "schedule"}},
        "sampler": {"name": "ode", "steps": 1000},
    }
    stage_defaults: ClassVar = {"sampler": {"name": "flow_sde", "steps": 40}, "updates_per_step": 1}
    published: ClassVar = {
        "algorithm.noise_levels": PublishedSetting(39, SCRIPT, "int(.99 * 40), all in one update"),
        "algorithm.sigma.kind": PublishedSetting("logit_normal", SCRIPT),
        "algorithm.sigma.shift": PublishedSetting(3.0, SCRIPT, "of SD3's scheduler"),
        "sampler.name": PublishedSetting("flow_sde", SFT, "eta .7, though no log-prob is used"),
        "sampler.steps": PublishedSetting(40, SFT),
        "reference.weight": PublishedSetting(0.0, SFT),
        "optimizer.lr": PublishedSetting(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(1, "yifan123/flow_grpo config/sft.py geneval_sd3"),
    }

    data_published: ClassVar = {
        "algorithm.noise_levels": PublishedSetting(1, ON_DATA, "for each picture and pass"),
        "algorithm.sigma.kind": PublishedSetting(
            "schedule", ON_DATA, "weighting_scheme none; logit_normal for SD3"
        ),
        "sampler.steps": PublishedSetting(1000, ON_DATA, "levels of the scheduler's training"),
        "data.caption_dropout": PublishedSetting(
            0.0,
            ON_DATA,
            deviation="classifier-free guidance has to go on working (2207.12598)",
        ),
        "optimizer.lr": PublishedSetting(
            1e-4, ON_DATA, deviation="that of sft on samples, also of LoRA adapters"
        ),
        "optimizer.weight_decay": PublishedSetting(1e-4, ON_DATA),
        "optimizer.max_grad_norm": PublishedSetting(1.0, ON_DATA),
        "batch_size": PublishedSetting(
            4, ON_DATA, deviation="the size of a run follows the machines, not the method"
        ),
    }

    noise_levels: int = Field(39, ge=1)
    """Number of (sigma, noise) samples per latent and pass."""
    sigma: SigmaConfig = SigmaConfig(kind="logit_normal", shift=3.0)
    """Distribution of the sigmas. The default is that of SD3's training and of Flow-GRPO's code."""
