"""The memory that feature caches of rollouts take, against what their hooks keep."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from diffusers.hooks.hooks import BaseState, StateManager
from diffusers.hooks.taylorseer_cache import TaylorSeerState

from ebbflow.estimate.run import estimate_from_sizes
from ebbflow.models import load_model, predict
from ebbflow.models.sizes import measure_model
from ebbflow.recipe.rollout_cache import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from ebbflow.rollouts.feature_cache import HOOKS, cache_features


class ByteCounter:
    """Counts the bytes of what hooks of diffusers keep on a network."""

    def __init__(self, network):
        self.seen = set()
        self.bytes = 0
        for module in network.modules():
            registry = vars(module).get(HOOKS)
            if registry is None:
                continue
            for hook in registry.hooks.values():
                for value in vars(hook).values():
                    if isinstance(value, StateManager):
                        self.add(value)

    def add(self, value):
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, torch.Tensor):
            # The ratios of MagCache are no features.
            self.bytes += value.untyped_storage().nbytes() if value.dim() > 1 else 0
        elif isinstance(value, dict):
            for entry in value.values():
                self.add(entry)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                self.add(entry)
        elif isinstance(value, (BaseState, StateManager, TaylorSeerState)):
            self.add(vars(value))


@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
@pytest.mark.parametrize(
    "cache",
    [
        FirstBlockCacheConfig(threshold=1e9),
        TaylorSeerCacheConfig(interval=3, warmup=3, order=1),
        MagCacheConfig(ratios=[1.0, 1.0], retention=0.5),
    ],
    ids=lambda cache: cache.name,
)
def test_what_a_feature_cache_keeps_is_counted(tiny_recipe, make_prompts, family, cache):
    if (family, cache.name) == ("sd3", "first_block"):
        pytest.skip("the tiny SD3 has one block besides the last, which this cache never skips")
    stage = {"kind": "offline", "algorithm": {"name": "diffusion_nft"}, "micro_batch": 4}
    stage |= {"group_size": 4, "sampler": {"name": "ode", "steps": 6}}
    stages = [stage, stage | {"rollout_cache": cache.model_dump()}]
    # Large enough that most tokens are those of the image, as MagCache keeps no text.
    model_keys = {"height": 256, "width": 256, "max_tokens": 32}
    recipe = tiny_recipe(family, model_keys, stages=stages, policy={"train": "full"})
    sizes, sample = measure_model(recipe.model)
    # Not the VAE, which takes more in a network as small as this.
    memory = estimate_from_sizes(recipe, 1, dataclasses.replace(sizes, vae=0), sample).memory
    plain, cached = (memory[f"{number} offline rollout"].activations for number in ("1.1", "1.2"))

    model = load_model(Path(recipe.model.path), recipe.model)
    conditioning = model.encode_prompts(make_prompts(4))
    latents = torch.randn(4, *model.latent_shape)
    # Without the last of six steps, after which MagCache drops what it has kept.
    with torch.no_grad(), cache_features(model, cache, 6, "float32"):
        for step in range(5):
            predict(model, latents, torch.full((4,), 1 - step / 6), conditioning)
        kept = ByteCounter(model.transformer).bytes
    # .70 of SD3 with MagCache, whose text counts and is not kept; 1.02 at most.
    assert 0.65 < kept / (cached - plain) < 1.1
