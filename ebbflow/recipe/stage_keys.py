"""The keys that all kinds of stages share, in three groups.

A group is a base class of ``StageConfig``: its keys stand flat in the YAML of a stage, and
``ebbflow keys`` prints its heading above them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ebbflow.recipe.base import Strict
from ebbflow.recipe.choices import (
    ENGINES,
    AdvantagesConfig,
    CorrectionConfig,
    ParityConfig,
    ReferenceConfig,
    SamplerConfig,
    SizeConfig,
    WindowConfig,
)
from ebbflow.recipe.data import AnchorConfig
from ebbflow.recipe.model import Precision
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.plugins import describe_choices, validate_name_or_path
from ebbflow.recipe.registry import AnyAlgorithmConfig
from ebbflow.recipe.rewards import MAX_WEIGHT
from ebbflow.recipe.rollout_cache import Quantization, RolloutCacheConfig


class CheckpointsConfig(Strict):
    """Checkpoints of a stage. A stage that resumes from one ends with the same bytes as a stage
    that was never stopped."""

    every: int = Field(10, ge=1)
    """Steps between two checkpoints; in an offline stage, optimiser steps."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep, in case the newest is damaged. The checkpoint with the
    best validation is kept as well."""


class LearningKeys(Strict):
    """What a stage learns with: the algorithm, the terms of its loss, and the optimiser."""

    heading: ClassVar = "algorithm, loss and optimiser"

    # Without a default: each kind of stage has its own.
    algorithm: AnyAlgorithmConfig
    advantages: AdvantagesConfig = AdvantagesConfig()
    reference: ReferenceConfig = ReferenceConfig()
    anchor: AnchorConfig | None = None
    """Flow-matching loss on captioned data beside the algorithm's own (docs/data.md)."""
    latent_weights: dict[str, Annotated[float, Field(ge=0, le=MAX_WEIGHT)]] = {}
    """Weight of each latent in the loss, for families whose samples are several latents, such as
    ``{video: 1, sound: 3}`` of ``ltx2``. The loss of a sample is the weighted average of the losses
    of its latents. Default: 1 each."""
    correction: CorrectionConfig | None = None
    """Off-policy correction, for algorithms on trajectories. Default: none; the ratio is against
    the rollout's log-probs, and rollouts of another policy or precision raise an alarm. With
    another ``engine`` the default is ``{mode: decoupled, weights: none}``."""
    guidance_in_loss: bool = True
    """For algorithms on trajectories and models with classifier-free guidance. false: rollouts are
    guided, and the loss trains the unguided prediction. Ratios are then against the unguided
    prediction before the updates of the step, which takes one more forward pass."""
    negative_gradient: bool = True
    """For losses on predictions with classifier-free guidance. false: no gradient goes through the
    prediction for the negative prompt, as in the code of Flow-GRPO. That half of a pass keeps no
    activations and has no backward pass. Prompts and negative prompts are then two passes, in
    rollouts too: their predictions are those of one pass up to rounding."""
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_batch: int = Field(64, ge=1)
    """Samples per forward and backward pass."""


class GenerationKeys(Strict):
    """How a stage generates samples: the sampler, the sizes and groups, and the engine."""

    heading: ClassVar = "generation of samples"

    sampler: SamplerConfig = SamplerConfig()
    window: WindowConfig | None = None
    """Window of trained denoising steps, for algorithms on trajectories. They have one by
    default."""
    sizes: list[SizeConfig] = []
    """Image sizes of the rollouts. Each step of an online stage, and each shard of an offline
    stage, has one size, sampled by weight. Default: the size of ``model``."""
    group_size: int = Field(16, ge=2)
    """Samples per prompt. Advantages compare samples within this group."""
    shared_initial_noise: bool = False
    """All samples of a prompt start from the same noise, which changes at every step of an online
    stage (``--init_same_noise`` of DanceGRPO and MixGRPO). Only the noise of stochastic steps makes
    them different."""
    engine: Annotated[str, validate_name_or_path(*ENGINES)] = Field(
        "diffusers",
        description=(
            f"{describe_choices(ENGINES)} Or package.module:Name of your own (docs/extending.md)."
        ),
    )
    parity: ParityConfig = ParityConfig()
    """Parity gate of an engine other than ``diffusers``."""
    rollout_precision: Precision | None = None
    """Precision of the network during rollouts. Default: ``model.precision``."""
    rollout_cache: RolloutCacheConfig | None = None
    """Feature cache of rollouts: faster samples that approximate the policy's, for algorithms
    without a ratio (docs/online.md). Validation and evaluation never use it. Default: none."""
    rollout_quantization: Quantization | None = None
    """``float8``: products of rollouts in 8 bits, by torchao (extra ``float8``), of a network in
    bfloat16, for the same algorithms. Validation and evaluation never use it. Default: none."""


class LimitKeys(Strict):
    """Where a stage stands in the run, when it saves its state, and when it stops or warns."""

    heading: ClassVar = "branch, checkpoints, limits and alarms"

    branch: str | None = None
    """The branch (a name of ``branches``) that this stage belongs to. Different branches start from
    the same policy and run side by side."""
    only_from_base: bool = False
    """Train this stage only in the first round of a run that starts from the base model, such as
    fine-tuning before reinforcement learning. A run that starts from an earlier policy skips it."""
    checkpoints: CheckpointsConfig | None = CheckpointsConfig()
    max_hours: float | None = Field(None, gt=0)
    """Hours after which the stage ends with the policy it has. The run continues."""
    max_gpu_hours: float | None = Field(None, gt=0)
    """The same limit in GPU hours, summed over all GPUs of the stage."""
    drift_alarm: float = Field(1.0, gt=0)
    """Warn in the log and in the report when the velocity drift from the base model, mean((v -
    v_base)^2), is above this value. A policy that learns well stays well below 1; one that games
    its reward often does not."""
