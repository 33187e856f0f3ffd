"""Which layers of a model are trained, and the LoRA adapters on them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from ebbflow.models.base import (
    DTYPES,
    Model,
    can_skip_autocast,
    is_trainable,
    trained_networks,
)
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.bfloat16 import compute_in_bfloat16
from ebbflow.training.loading import find_pending_weights, read_magnitudes
from ebbflow.training.policy_metadata import PolicyError

ADAPTER = "default"


def choose_trained_layers(model: Model, config: PolicyConfig) -> None:
    """Let the parameters of the chosen layers get gradients, and no others."""
    for prefix, network in trained_networks(model.transformer).items():
        for name, parameter in network.named_parameters():
            layer = prefix + name.rpartition(".")[0]
            parameter.requires_grad_(is_layer_chosen(layer, config) and is_trainable(model, name))


def is_layer_chosen(layer: str, config: PolicyConfig) -> bool:
    """Return whether a layer, by its name, is among those to train."""
    return config.layers is None or any(fnmatchcase(layer, pattern) for pattern in config.layers)


def no_matching_layers_error(model: Model, config: PolicyConfig) -> PolicyError:
    """Build the error of ``policy.layers`` or ``policy.targets`` that fit nothing, with names of
    layers that would.
    """
    linears = [
        name
        for name, layer in model.transformer.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    layers = [name for name in linears if is_trainable(model, name)]
    of = (
        f" among the targets {', '.join(config.targets or model.lora_targets)}"
        if config.train == "lora" and config.layers
        else ""
    )
    key = (
        f"policy.layers = {config.layers}"
        if config.layers
        else f"policy.targets = {config.targets}"
    )
    return PolicyError(
        f"{key}: no layer{of} that is trained has such a name. Layers are called {layers[0]} or"
        f" {layers[-1]}; write patterns such as 'transformer_blocks.1?.*' or '*.attn.*'"
    )


def add_lora(model: Model, config: PolicyConfig, seed: int) -> None:
    """Freeze the weights of a model in its own precision, and add float32 LoRA adapters to it."""
    _round_frozen_weights(model)
    model.transformer.requires_grad_(False)
    # peft samples the first factors from torch's global generator. All processes get the same, and
    # the caller's generator is left where it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for prefix, network in trained_networks(model.transformer).items():
            network.add_adapter(
                build_lora_config(model, prefix, network, config), adapter_name=ADAPTER
            )
    for parameter in model.transformer.parameters():
        if parameter.requires_grad:
            # Adapters are trained in float32, whatever the precision of the weights below them.
            parameter.data = parameter.data.float()
    if model.precision == "bfloat16" and not config.dora and can_skip_autocast(model):
        compute_in_bfloat16(model)
    elif not config.dora:
        # peft casts inputs to the float32 of the adapters, and autocast casts them back to 16 bits:
        # two kernels in every layer for the same bytes.
        for layer in model.transformer.modules():
            if isinstance(layer, LoraLayer):
                layer.cast_input_dtype_enabled = False
    if config.dora and find_pending_weights(model):
        read_magnitudes(model, ADAPTER)
    elif config.dora:
        for layer in model.transformer.modules():
            if isinstance(layer, LoraLayer):
                # The magnitudes, [out], in the precision in which peft divides by the norm: their
                # ratio is 1 at the base model.
                layer.lora_magnitude_vector[ADAPTER].weight.data = (
                    layer.get_base_layer().weight.detach().float().norm(dim=1)
                )


def _round_frozen_weights(model: Model) -> None:
    """Keep the weights in the model's precision, but for the layers that diffusers names as too
    delicate for it.
    """
    for network in trained_networks(model.transformer).values():
        delicate = set(network._keep_in_fp32_modules or ())
        for name, parameter in network.named_parameters():
            if not delicate.intersection(name.split(".")):
                parameter.data = parameter.data.to(DTYPES[model.precision])


def build_lora_config(model: Model, prefix: str, network: Any, config: PolicyConfig) -> LoraConfig:
    """Build peft's configuration of the adapters of a network, which is also stored with them."""
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_find_lora_targets(model, prefix, network, config),
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
        use_rslora=config.rslora,
        use_dora=config.dora,
    )


def _find_lora_targets(model: Model, prefix: str, network: Any, config: PolicyConfig) -> list[str]:
    """Find the layers of a network that LoRA adapts: ends of their names, or where only some of
    them are trained, whole names.

    ``prefix`` is what stands before them in the names of the transformer, which ``policy.layers``
    means.
    """
    ends = config.targets or model.lora_targets  # a policy's always names them
    # Once it has adapters, peft keeps a layer as ``<name>.base_layer``. The names stay the same, so
    # that a policy folder says the same targets before and after.
    names = {
        name.replace(".base_layer", "")
        for name, layer in network.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    fitting = {name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)}
    trainable = {name for name in fitting if is_trainable(model, name)}
    if config.layers is None and trainable == fitting:
        return ends  # as diffusers and people write them
    chosen = sorted(name for name in trainable if is_layer_chosen(prefix + name, config))
    if not chosen:
        raise no_matching_layers_error(model, config)
    return chosen
