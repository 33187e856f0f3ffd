"""Where training starts: the base model, an earlier policy, or a LoRA that somebody published."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from ebbflow.models import Model
from ebbflow.models.base import find_lora_class, is_trainable, trained_networks
from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import digest_of_folder
from ebbflow.training.adapters import ADAPTER
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_model
from ebbflow.training.policy_metadata import (
    METADATA,
    PolicyError,
    PolicyMetadata,
    choose_policy_config,
    read_policy_metadata,
    require_base,
    sampling_settings,
)

PUBLISHED = "published"


def write_start_policy(
    recipe: Recipe, base: Path, source: Path, folder: Path, start: str | None
) -> None:
    """Write the policy folder, version 0, of what ``policy.start`` leads to: a policy folder, or a
    LoRA file or its folder.

    Args:
        source: where it lies on this machine.
        start: where it comes from, as the metadata call it.

    Raises:
        PolicyError: it is of another base or kind, or its adapters do not fit into the recipe's.
    """
    model = open_model(recipe, base)
    if (source / METADATA).is_file():
        require_base(read_policy_metadata(source), base, source)
        policy = Policy(model, choose_policy_config(recipe.policy, source), recipe.seed)
        policy.load_folder(source)
    else:
        policy = Policy(model, recipe.policy, recipe.seed)
        policy.assign_parameters(
            convert_lora_parameters(model, recipe.policy, policy.parameters, source)
        )
    metadata = PolicyMetadata(
        base_digest=digest_of_folder(base),
        recipe_digest=recipe.digest,
        config=recipe.policy,
        model=recipe.model,
        start=start,
        **sampling_settings(recipe.evaluation),
    )
    if recipe.policy.ema:
        policy.ensure_copy("ema")
    policy.save_folder(folder, metadata)


@torch.no_grad()
def convert_lora_parameters(
    model: Model, config: PolicyConfig, parameters: dict[str, Tensor], source: Path
) -> dict[str, Tensor]:
    """Convert a published LoRA to parameters of our adapters, by name, that compute the same.

    Of a rank below ours, the rows that it lacks keep their random values and meet zeros in the
    second factor; the ratio of the scales, alpha / rank against ours, goes into the second factor.
    Layers that it leaves alone stay at the base.

    Args:
        parameters: ours, ``<layer>.lora_A.<adapter>.weight`` and ``lora_B``.

    Raises:
        PolicyError: it cannot be read, adapts other layers than ours, or has a larger rank.
    """
    if config.train != "lora":
        raise PolicyError(
            "policy.start names a LoRA and policy.train is 'full'; set policy.train to lora"
        )
    if len(trained_networks(model.transformer)) > 1:
        raise PolicyError(
            "policy.start names a LoRA of one network, and model.expert is both; start from a"
            " policy folder"
        )
    if config.dora:
        raise PolicyError(
            "policy.start names a LoRA, and policy.dora starts from a policy folder alone; set"
            " policy.dora to false"
        )
    published = _load_published_lora(model, source)
    converted = dict(parameters)
    for layer, (first, second, its_scale) in published.items():
        names = [f"{layer}.lora_{factor}.{ADAPTER}.weight" for factor in "AB"]
        rank = len(first)
        if not is_trainable(model, layer):
            raise PolicyError(
                f"{source} adapts {layer}, which is never trained; take a LoRA without"
            )
        if names[0] not in parameters:
            raise PolicyError(
                f"{source} adapts {layer}, which policy.targets leave out; add"
                f" {'.'.join(layer.split('.')[-2:])!r}"
            )
        if rank > config.rank:
            raise PolicyError(
                f"{source} has rank {rank} at {layer} and policy.rank = {config.rank}; set"
                f" policy.rank to {rank}"
            )
        # The adapter adds scale * second @ first to the weight: (out, rank) @ (rank, in).
        ours_first, ours_second = (parameters[name].detach().clone() for name in names)
        ours_first[:rank] = first
        ours_second.zero_()
        ours_second[:, :rank] = second * (its_scale / config.adapter_scale)
        converted |= dict(zip(names, (ours_first, ours_second), strict=True))
    return converted


def _load_published_lora(model: Model, source: Path) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Load (first factor [rank, in], second [out, rank], scale) of each layer, read by diffusers in
    any format that it knows.
    """
    file = _find_lora_file(source)
    # diffusers converts the formats of other trainers to its own names, and knows where the scale
    # of each layer stands. So the LoRA is loaded beside our adapter and removed again, and no
    # format is parsed here.
    try:
        state, metadata = find_lora_class(model).lora_state_dict(
            file, return_lora_metadata=True, use_safetensors=True, local_files_only=True
        )
        with warnings.catch_warnings():
            # There are two adapters for a moment, on purpose.
            warnings.simplefilter("ignore", UserWarning)
            model.transformer.load_lora_adapter(
                dict(state), prefix="transformer", adapter_name=PUBLISHED, metadata=metadata
            )
    except Exception as error:  # diffusers, peft and safetensors each have errors of their own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise PolicyError(
            f"policy.start: {file} cannot be read as a LoRA of this model ({reason[:500]})"
        ) from error
    if any("lora_magnitude_vector" in key for key in state):
        raise PolicyError(
            f"policy.start: {file} is a DoRA, whose magnitudes have no place in a LoRA; take a"
            " LoRA, or fuse it first"
        )
    others = sorted({key.split(".")[0] for key in state} - {"transformer"})
    if others:
        raise PolicyError(
            f"policy.start: {file} adapts {', '.join(others)} too, which training leaves alone;"
            " take one without"
        )
    layers = {
        name: (*_read_factors(state, name, module), module.scaling[PUBLISHED])
        for name, module in model.transformer.named_modules()
        if isinstance(module, LoraLayer) and PUBLISHED in module.lora_A
    }
    model.transformer.set_adapter(ADAPTER)
    model.transformer.delete_adapters(PUBLISHED)
    if not layers:
        raise PolicyError(
            f"policy.start: {file} adapts no layer of the transformer; name a LoRA of this model"
        )
    return layers


def _read_factors(state: dict[str, Tensor], layer: str, module: LoraLayer) -> tuple[Tensor, Tensor]:
    """Read the two factors of a layer as the file has them: the module may keep them in the lower
    precision of the layer that they adapt.
    """
    device = module.lora_A[PUBLISHED].weight.device
    first, second = (
        state[f"transformer.{layer}.lora_{factor}.weight"].to(device, torch.float32)
        for factor in "AB"
    )
    return first, second


def _find_lora_file(source: Path) -> Path:
    """Return the LoRA file itself, or the only one in its folder."""
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise PolicyError(
            f"policy.start: {source} should hold one .safetensors file and holds {names}; name the"
            " file itself"
        )
    return files[0]
