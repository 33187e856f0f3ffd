"""Load published weights into frozen networks: without pickles, and with an error for whatever does
not fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError  # what torch raises for weights that are more than weights
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ebbflow.models.base import default_device
from ebbflow.rewards.base import RewardError

HEAD_LAYERS = (0, 2, 4, 6, 7)
"""The linear layers of a head by their published numbers; the numbers between were dropouts in
training.
"""
LOADING = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
"""With the report: transformers itself only warns and initialises missing weights at random."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or torch file by name; no pickled code is executed.

    Raises:
        RewardError: the file holds anything but tensors.
    """
    try:
        saved: Any
        if path.suffix == ".safetensors":
            saved = load_file(path)
        else:
            # A published checkpoint is somebody else's file: with ``weights_only`` torch builds
            # tensors and containers, and raises for any other object.
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, SafetensorError):
        raise RewardError(
            f"{path} is damaged or holds more than weights; take the published file"
        ) from None
    # A checkpoint of a training has the weights under this key, beside the state of its optimiser.
    weights = saved.get("state_dict", saved) if isinstance(saved, dict) else {}
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise RewardError(f"{path} is no table of weights by name; take the published file")
    return weights


def rename_weights(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights with every pattern of ``names`` replaced in turn.

    Example::

        rename_weights({"ln_final.bias": bias}, {"^ln_final": "text_model.final_layer_norm"})
        # {"text_model.final_layer_norm.bias": bias}
    """
    renamed = {}
    for name, tensor in weights.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def select_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights under a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def pick_weights(weights: Mapping[str, Tensor], names: Sequence[str], source: Path) -> list[Tensor]:
    """Return some of the weights, in the order of ``names``.

    Raises:
        RewardError: one of them is missing.
    """
    absent = [name for name in names if name not in weights]
    if absent:
        raise RewardError(f"{source} lacks the weights {absent[0]!r}; take the published file")
    return [weights[name] for name in names]


def merge_lora_weights(
    weights: Mapping[str, Tensor], scale: float, source: Path
) -> dict[str, Tensor]:
    """Return the weights of a network that peft wrapped, under their own names, with its adapter
    ``default`` merged, in float32.

    Args:
        scale: of the product B A.

    Raises:
        RewardError: an adapter lacks a part.
    """
    # peft renames a layer it wraps from "q_proj.weight" to "q_proj.base_layer.weight".
    unwrapped = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in select_prefix(weights, "base_model.model.").items()
    }
    merged = {name: tensor for name, tensor in unwrapped.items() if ".lora_" not in name}
    for name in unwrapped:
        if not name.endswith(".lora_A.default.weight"):
            continue
        layer = name.removesuffix(".lora_A.default.weight")
        weight, lora_a, lora_b = pick_weights(
            unwrapped, (f"{layer}.weight", name, f"{layer}.lora_B.default.weight"), source
        )
        # (out, in) + scale * (out, rank) @ (rank, in). In float32: a bfloat16 sum would round away
        # most of the small second term.
        merged[f"{layer}.weight"] = weight.float() + scale * lora_b.float() @ lora_a.float()
    return merged


def load_network(kind: Any, folder: Path, unused: str = "$^") -> Any:
    """Load a network of transformers from a folder in its layout: frozen, in float32, on the
    device.

    Args:
        unused: pattern of names of weights without an effect, which may be missing or left over.

    Raises:
        RewardError: weights are missing, left over, or of another shape.
    """
    return _freeze_network(
        kind.from_pretrained(folder, local_files_only=True, use_safetensors=True, **LOADING),
        kind,
        folder,
        unused,
    )


def build_network(
    kind: Any, config: Any, weights: dict[str, Tensor], source: Path, **keys: Any
) -> Any:
    """Build a network as ``load_network`` does, from weights that were read from ``source`` and
    renamed.

    Args:
        keys: go to the network; ``dtype`` for another than float32.

    Raises:
        RewardError: weights are missing, left over, or of another shape.
    """
    return _freeze_network(
        kind.from_pretrained(None, config=config, state_dict=weights, **LOADING | keys),
        kind,
        source,
    )


def _freeze_network(
    loaded: tuple[Any, dict[str, Any]], kind: Any, source: Path, unused: str = "$^"
) -> Any:
    network, report = loaded
    # Without this a reward with a layer of random numbers would score as if it were whole.
    names = sorted(
        str(name)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in report[key]
    )
    misfits = [name for name in names if not re.search(unused, name)]
    if misfits:
        raise RewardError(
            f"{source} does not fit this {kind.__name__}: {len(misfits)} weights differ, first"
            f" {misfits[0]}; take the published files"
        )
    return network.requires_grad_(False).eval().to(default_device())


def load_linear_head(weights: Mapping[str, Tensor], width: int, source: Path) -> nn.Module:
    """Load the linear layers, one after the other, that make one number of ``width`` features: [n,
    width] -> [n, 1].

    Raises:
        RewardError: the weights are not theirs, or are made for another width.
    """
    pairs = [
        pick_weights(weights, (f"layers.{number}.weight", f"layers.{number}.bias"), source)
        for number in HEAD_LAYERS
    ]
    expected_width = pairs[0][0].shape[1]  # a weight is (out, in)
    if expected_width != width:
        raise RewardError(
            f"the head in {source} takes {expected_width} features, and its network gives {width};"
            " take the network it is for"
        )
    head = nn.Sequential(*(_build_linear_layer(weight, bias) for weight, bias in pairs))
    return head.requires_grad_(False).to(default_device())


def build_plain_head(weight: Tensor, device: torch.device) -> nn.Module:
    """Build a linear layer without bias, float32, frozen: [n, width] -> [n, outputs]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.load_state_dict({"weight": weight.float()})
    return layer.requires_grad_(False).to(device)


def _build_linear_layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def check_vocabulary(tokenizer: Any, size: int, source: Path) -> None:
    """Check that a tokenizer is made for a text encoder with ``size`` embeddings.

    Raises:
        RewardError: it is not.
    """
    if len(tokenizer) != size:
        raise RewardError(
            f"the tokenizer in {source} has {len(tokenizer)} tokens and the text encoder {size};"
            " take the one it is for"
        )
