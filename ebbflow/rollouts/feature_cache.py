"""Feature caches of rollouts: diffusers' hooks on the blocks of the network, for one micro-batch.

The hooks keep what earlier denoising steps computed and skip blocks or layers of later ones. They
are set before the first step of a micro-batch and removed after its last one, so that no state
reaches another micro-batch, a training pass or an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from diffusers.hooks import (
    FirstBlockCacheConfig,
    HookRegistry,
    MagCacheConfig,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
    apply_mag_cache,
    apply_taylorseer_cache,
)
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS as BLOCK_LISTS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import nn

from ebbflow.models.base import DTYPES, Model, ModelError, trained_networks
from ebbflow.recipe import rollout_cache as recipe
from ebbflow.recipe.model import Precision

CONTEXT = "rollout"
"""Name of the state of a micro-batch. Prompts and negative prompts are rows of one pass, which is
skipped or computed as a whole.
"""
HOOKS = "_diffusers_hook"
"""The attribute in which diffusers keeps the hooks of a module."""
ATTENTION_LAYERS = [r"(single_)?(transformer_)?blocks\.\d+\.attn\d?"]
"""diffusers' own patterns end in "attn" and match no layer of Wan and LTX (attn1, attn2)."""


@contextmanager
def cache_features(
    model: Model, cache: recipe.FeatureCacheConfig, steps: int, precision: Precision
) -> Iterator[None]:
    """Have the network reuse features of its earlier calls inside the block, which denoises one
    micro-batch.

    Args:
        steps: denoising steps of the schedule; the network is called once in each.

    Raises:
        ModelError: the network has other hooks, or no layers that the cache knows.
    """
    with hook_networks(model, cache.name, partial(_apply_cache, cache, steps, precision)):
        yield


@contextmanager
def hook_networks(
    model: Model, name: str, apply_hooks: Callable[[nn.Module], None]
) -> Iterator[None]:
    """Apply hooks of diffusers to the networks of a model inside the block, and leave nothing of
    them.

    Args:
        name: of the cache, for errors.

    Raises:
        ModelError: as of ``cache_features``.
    """
    networks = list(trained_networks(model.transformer).values())
    modules = [module for network in networks for module in network.modules()]
    if any(HOOKS in vars(module) for module in modules):
        raise ModelError(
            f"rollout_cache.name = {name!r}: the network has hooks of diffusers already; leave"
            " rollout_cache out"
        )
    # diffusers replaces ``forward`` in the module itself; most have only that of their class.
    forwards = [(module, vars(module).get("forward")) for module in modules]
    try:
        with ExitStack() as contexts:
            for network in networks:
                _register_sharded_blocks(network)
                # The context of a pass is set on all hooks below a registry of the network.
                HookRegistry.check_if_exists_or_initialize(network)
                try:
                    apply_hooks(network)
                except ValueError as error:  # a class of blocks that diffusers does not know
                    raise ModelError(
                        f"rollout_cache.name = {name!r} does not fit {type(network).__name__}:"
                        f" {error} Leave rollout_cache out"
                    ) from error
                registries = [vars(module).get(HOOKS) for module in network.modules()]
                if not any(registry and registry.hooks for registry in registries):
                    raise ModelError(
                        f"rollout_cache.name = {name!r} finds no layer of {type(network).__name__}"
                        " that it knows; leave rollout_cache out"
                    )
                # Called on the class, as SD3's network is no ``CacheMixin``.
                contexts.enter_context(CacheMixin.cache_context(network, CONTEXT))
            yield
    finally:
        # diffusers' own removal leaves the registries, and in each module a reference to itself.
        for module, forward in forwards:
            vars(module).pop(HOOKS, None)
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def _apply_cache(
    cache: recipe.FeatureCacheConfig, steps: int, precision: Precision, network: nn.Module
) -> None:
    match cache:
        case recipe.FirstBlockCacheConfig():
            blocks = _select_cacheable_blocks(network)
            apply_first_block_cache(blocks, FirstBlockCacheConfig(cache.threshold))
        case recipe.TaylorSeerCacheConfig():
            config = TaylorSeerCacheConfig(
                cache_interval=cache.interval,
                # diffusers computes the second step after these, and then every ``interval`` one.
                disable_cache_before_step=cache.warmup,
                max_order=cache.order,
                taylor_factors_dtype=DTYPES[precision],
                cache_identifiers=ATTENTION_LAYERS,
            )
            apply_taylorseer_cache(network, config)
        case recipe.MagCacheConfig():
            apply_mag_cache(
                network,
                MagCacheConfig(
                    threshold=cache.threshold,
                    max_skip_steps=cache.max_skips,
                    retention_ratio=cache.retention,
                    num_inference_steps=steps,
                    mag_ratios=torch.tensor(cache.ratios),
                ),
            )
        case _:
            raise TypeError(f"no cache of {type(cache).__name__}")


def _select_cacheable_blocks(network: nn.Module) -> nn.Module:
    """Return a module whose lists are those of the network, without blocks that return no text.

    The first-block cache adds the residual of both streams, and SD3's last block has no text to
    return: it is computed in every step.
    """
    selected = nn.Module()
    num_blocks = 0
    for name, blocks in network.named_children():
        if name in BLOCK_LISTS and isinstance(blocks, nn.ModuleList):
            kept = [block for block in blocks if not getattr(block, "context_pre_only", False)]
            selected.add_module(name, nn.ModuleList(kept))
            num_blocks += len(kept)
    if num_blocks < 2:
        raise ModelError(
            f"rollout_cache.name = 'first_block' skips the blocks after the first one, and"
            f" {type(network).__name__} has {num_blocks} that can be cached; leave rollout_cache"
            " out"
        )
    return selected


def _register_sharded_blocks(network: nn.Module) -> None:
    """Tell diffusers what the blocks that FSDP2 has given a class of their own return."""
    # diffusers fills the registry when it is first asked, which in a process may be only below.
    TransformerBlockRegistry._register()
    for block in network.modules():
        registered = TransformerBlockRegistry._registry
        if type(block) in registered:
            continue
        for parent in type(block).__mro__[1:]:
            # A copy, as diffusers notes in it the class that it was registered for.
            if parent in registered:
                TransformerBlockRegistry.register(type(block), replace(registered[parent]))
                break
