"""The ratios that MagCache skips by, measured on a model."""

from __future__ import annotations

from diffusers.hooks import MagCacheConfig, apply_mag_cache
from diffusers.hooks.mag_cache import _MAG_CACHE_LEADER_BLOCK_HOOK as FIRST_BLOCK_HOOK
from torch import nn

from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import Conditioning, Model
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.feature_cache import HOOKS, hook_networks
from ebbflow.rollouts.generate import generate_samples


def measure_mag_ratios(
    model: Model, conditioning: Conditioning, keys: SampleKeys, sampler: SamplerConfig
) -> list[float]:
    """Measure ``rollout_cache.ratios`` of MagCache (2506.09045) on some samples of a model: for
    each denoising step the mean size of the residual of all blocks, over that of the step before.

    Args:
        conditioning: a row for each of ``keys``; they are denoised together.

    Raises:
        ModelError: diffusers does not know the blocks of the network.
    """
    # One step more than there are: after the last one diffusers would print the ratios and drop
    # them.
    config = MagCacheConfig(calibrate=True, num_inference_steps=sampler.steps + 1)

    def measure_residuals(network: nn.Module) -> None:
        apply_mag_cache(network, config)

    with hook_networks(model, "mag", measure_residuals):
        generate_samples(model, conditioning, keys, sampler, micro_batch=len(keys))
        registry = vars(model.list_blocks()[0])[HOOKS]
        state = registry.get_hook(FIRST_BLOCK_HOOK).state_manager.get_state()
        return [float(ratio) for ratio in state.calibration_ratios]
