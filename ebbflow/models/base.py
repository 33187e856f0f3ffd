"""What the rest of the library asks of a model family. One adapter (one file) per family implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.layout import ModelError
from ebbflow.recipe.model import Precision

__all__ = ["DTYPES", "Conditioning", "Model", "ModelError", "default_device", "device_of", "predict"]

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, a row each.

    Attributes:
        tensors: what the family's network is told, by name; each [N, ...], those of rank 3 and masks padded along dimension 1.
        negative: what guidance steers away from, a row each; None where there is no classifier-free guidance.
        guidance: its scale, or the one that the network takes as an input.
    """

    tensors: Mapping[str, Tensor]
    negative: Conditioning | None = None
    guidance: float = 1.0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def rows(self, index: Tensor | slice) -> Conditioning:
        """The conditioning of some rows, repeated where ``index`` repeats them."""
        return self._map(lambda values: values[index])

    def to(self, device: torch.device) -> Conditioning:
        return self._map(lambda values: values.to(device))

    def float(self) -> Conditioning:
        """In float32, but for masks."""
        return self._map(lambda values: values.float() if values.is_floating_point() else values)

    def unguided(self) -> Conditioning:
        """The prompts alone, for losses on the network's own prediction; a guidance that it takes as an input stays."""
        return replace(self, negative=None)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        tensors = {name: change(values) for name, values in self.tensors.items()}
        return replace(self, tensors=tensors, negative=self.negative._map(change) if self.negative else None)

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """The rows of all parts, padded with zeros to the longest prompt."""
        tensors = {name: _padded([part[name] for part in parts]) for name in parts[0].tensors}
        negatives = [part.negative for part in parts if part.negative is not None]
        return replace(parts[0], tensors=tensors, negative=Conditioning.cat(negatives) if negatives else None)


def _padded(tensors: list[Tensor]) -> Tensor:
    if tensors[0].ndim < 2:
        return torch.cat(tensors)
    longest = max(values.shape[1] for values in tensors)
    return torch.cat([_lengthened(values, longest) for values in tensors])


def _lengthened(values: Tensor, length: int) -> Tensor:
    missing = values.new_zeros(len(values), length - values.shape[1], *values.shape[2:])
    return torch.cat([values, missing], 1) if missing.shape[1] else values


class Model(Protocol):
    """A loaded base model.

    Attributes:
        transformer: the velocity network, the only part that is ever trained.
        latent_shape: shape of one latent, without the batch.
        lora_targets: names of the linear layers that LoRA adapts.
        pipeline_class: the diffusers pipeline of the family, which reads and writes its LoRA files.
        precision: of the network's arithmetic.
    """

    transformer: Any  # a diffusers ModelMixin: an nn.Module that also saves, loads and takes adapters
    latent_shape: tuple[int, ...]
    lora_targets: list[str]
    pipeline_class: Any
    precision: Precision

    def sigmas(self, steps: int) -> Tensor:
        """The family's schedule of ``steps`` denoising steps: float32 [steps + 1], descending, ending in 0."""

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts, with what guidance needs of them; deterministic, without gradient, on any device (``encode_once``)."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The forward pass, guidance included, [N, *latent_shape]; ``sigma`` is [N] in [0, 1]. Called through ``predict``."""

    def decode(self, latents: Tensor) -> np.ndarray:
        """Images, uint8 RGB [N, height, width, 3], or videos, [N, frames, height, width, 3]."""

    def encode_images(self, images: np.ndarray) -> Tensor:
        """Latents [N, *latent_shape] of images, uint8 RGB [N, height, width, 3]: the inverse of ``decode`` up to quantisation.

        Raises:
            ModelError: the images do not have the size of the latents; names both.
        """

    def save(self, folder: Path) -> None:
        """Write the model as a pipeline folder, its large parts in shards."""

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of the transformer, in order: the units of FSDP sharding."""


def predict(
    model: Model, latents: Tensor, sigma: Tensor, conditioning: Conditioning, precision: Precision | None = None
) -> Tensor:
    """The ONE forward pass of rollout, training and evaluation: the velocity, float32 [N, *latent_shape].

    That all use it is what makes the first ratio of a policy gradient exactly 1. ``precision`` is the model's unless a rollout
    asks for another one.
    """
    precision = precision or model.precision
    if precision == "float32":  # where nothing casts, prompts that were encoded in 16 bits must be cast here
        conditioning = conditioning.float()
    with torch.autocast(latents.device.type, DTYPES[precision], enabled=precision != "float32"):
        return model.velocity(latents, sigma, conditioning).float()


def device_of(model: Model) -> torch.device:
    """Where the network of a model is."""
    return next(model.transformer.parameters()).device


def default_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
