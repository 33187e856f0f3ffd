"""Rollouts that approximate the policy, by a feature cache or in 8 bits: what they skip or round,
and which algorithms may train on their samples.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ebbflow.recipe.base import RecipeError, Strict

RATIO_REASON = "takes a ratio against the log-probs of the rollout, which must be the policy's own"
REPEATED_REASON = (
    "generates the samples of the rollout again to train on them, and would train on other samples"
    " than the rewards scored"
)


class FeatureCacheConfig(Strict):
    """What every cache has.

    Attributes:
        name: what ``rollout_cache.name`` says.
        is_lossless: whether the samples are those without the cache, up to rounding. A lossless
            accelerator is for all algorithms.
    """

    is_lossless: ClassVar[bool] = False

    name: str

    @abstractmethod
    def count_kept_outputs(self, attention_layers: int) -> int:
        """Return how many outputs of a block or layer, [tokens, width], a sample keeps between
        steps, for the estimate of memory.

        Args:
            attention_layers: of the network; a block has one or two.
        """


class FirstBlockCacheConfig(FeatureCacheConfig):
    """First-block cache (ParaAttention): compute the first block; where its residual has hardly
    changed since the last full step, add the residual that the other blocks had there."""

    name: Literal["first_block"] = "first_block"
    threshold: float = Field(0.05, gt=0)
    """Largest relative change of the first block's residual, mean(|r - r_last|) / mean(|r_last|)
    over a micro-batch, at which the other blocks are skipped."""

    def count_kept_outputs(self, attention_layers: int) -> int:
        # The output and the residual of the first block, and the residual of all others.
        return 3


class TaylorSeerCacheConfig(FeatureCacheConfig):
    """TaylorSeer (2503.06923): extrapolate the output of every attention layer from its last full
    steps, by a Taylor series in the index of the step."""

    name: Literal["taylor_seer"] = "taylor_seer"
    interval: int = Field(4, ge=2)
    """Denoising steps from one full step to the next."""
    warmup: int = Field(2, ge=1)
    """First denoising steps, which are all full. At least ``order`` + 1 of them are useful."""
    order: int = Field(1, ge=0, le=4)
    """Order of the series. Each layer keeps ``order`` + 1 outputs in memory."""

    def count_kept_outputs(self, attention_layers: int) -> int:
        return attention_layers * (self.order + 1)


class MagCacheConfig(FeatureCacheConfig):
    """MagCache (2506.09045): skip all blocks and add their last residual, while the known decay of
    its size keeps the estimated error small."""

    name: Literal["mag"] = "mag"
    ratios: list[float] = Field(min_length=2)
    """For each denoising step the mean size of the residual of all blocks, divided by that of the
    step before; the first is 1. They depend on the model:
    ``ebbflow.rollouts.mag_ratios.measure_mag_ratios`` measures them. Others than
    ``sampler.steps`` are interpolated."""
    threshold: float = Field(0.06, gt=0)
    """Largest accumulated error of skipped steps."""
    max_skips: int = Field(3, ge=1)
    """Largest number of steps that are skipped in a row."""
    retention: float = Field(0.2, ge=0, le=1)
    """Share of the first steps that are never skipped."""

    def count_kept_outputs(self, attention_layers: int) -> int:
        # The input of the first block, and the residual of all blocks.
        return 2


RolloutCacheConfig = Annotated[
    FirstBlockCacheConfig | TaylorSeerCacheConfig | MagCacheConfig, Field(discriminator="name")
]


Quantization = Literal["float8"]
"""Products of rollouts in 8 bits of floating point, e4m3 (``ebbflow.rollouts.quantization``)."""


def check_approximations(stage: Any) -> None:
    """Check that a stage (``StageConfig``) may generate with its ``rollout_cache`` and its
    ``rollout_quantization``.

    Raises:
        ValueError: it may not; names the key, the reason and the fix.
    """
    cache = stage.rollout_cache
    if stage.rollout_quantization is not None:
        _check_approximation(
            stage, "rollout_quantization", f"rollout_quantization = {stage.rollout_quantization!r}"
        )
    if cache is None:
        return
    key = f"rollout_cache.name = {cache.name!r}"
    _check_approximation(stage, "rollout_cache", key, cache.is_lossless)
    # A cache would add the residual of few rows to many: equal samples are predicted as one row
    # until the first noise makes them differ.
    if stage.shared_initial_noise:
        raise ValueError(
            f"{key} needs the same rows in every step, and shared_initial_noise predicts equal"
            " samples once; leave one of them out"
        )


def require_whole_weights(stage: Any, key: str, shards: int) -> None:
    """Check that the processes which round the rollouts of a stage (``StageConfig``) have whole
    weights.

    Args:
        key: of the stage.
        shards: processes of a colocated stage that share one copy of the model.

    Raises:
        RecipeError: they have not.
    """
    # ``placement`` is a field of online stages.
    if stage.rollout_quantization and getattr(stage, "placement", "") == "colocated" and shards > 1:
        raise RecipeError(
            f"{key}.rollout_quantization = {stage.rollout_quantization!r} rounds whole weights, and"
            f" {shards} processes share them; set train_sharding: replicated in the deployment, or"
            " placement: ray, or leave it out"
        )


def require_quantization(stage: Any, key: str) -> None:
    """Check that what rounds the rollouts of a stage (``StageConfig``) is installed.

    Args:
        key: of the stage.

    Raises:
        RecipeError: it is not.
    """
    if stage.rollout_quantization and importlib.util.find_spec("torchao") is None:
        raise RecipeError(
            f"{key}.rollout_quantization = {stage.rollout_quantization!r} needs torchao, which is"
            ' not installed; run `pip install "ebbflow[float8]"`, or leave it out'
        )


def _check_approximation(stage: Any, name: str, key: str, is_lossless: bool = False) -> None:
    """Check that a stage may generate other samples than the policy's.

    Args:
        name: of the recipe's key.
        key: with its value, for errors.
    """
    kind = stage.algorithm_kind
    if not is_lossless and not kind.trains_on_any_samples:
        reason = RATIO_REASON if kind.records_trajectory else REPEATED_REASON
        raise ValueError(
            f"{key} approximates the network, and {stage.algorithm_name} {reason}; leave"
            f" {name} out, or set algorithm.name to one that trains on final latents, such as"
            " diffusion_nft"
        )
    # ``kind`` is a field of the subclasses.
    if getattr(stage, "kind", "") == "custom":
        raise ValueError(f"{key}: a stage of your own kind generates as it likes; leave {name} out")
    if stage.source_file:
        raise ValueError(
            f"{key}: the stage trains on {stage.source_file} and generates nothing; leave"
            f" {name} out"
        )
    if stage.engine != "diffusers":
        raise ValueError(
            f"{key} works on the network of this process, and engine = {stage.engine!r} has its"
            f" own; set engine: diffusers, or leave {name} out"
        )
