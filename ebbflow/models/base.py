"""What the rest of the library asks of a model family. One adapter (one file) per family implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


class ModelError(Exception):
    """A base-model folder that cannot be used: names the folder, what is wrong and the way out."""


@dataclass(frozen=True)
class Conditioning:
    """Encoded prompts, one row each.

    Attributes:
        embeds: [N, tokens, width].
        pooled: [N, width].
    """

    embeds: Tensor
    pooled: Tensor

    def rows(self, index: Tensor | slice) -> Conditioning:
        """The conditioning of some rows, repeated where ``index`` repeats them."""
        return Conditioning(self.embeds[index], self.pooled[index])


class Model(Protocol):
    """A loaded base model.

    Attributes:
        transformer: the velocity network, the only part that is ever trained.
        latent_shape: shape of one latent, without the batch.
        lora_targets: names of the linear layers that LoRA adapts.
    """

    transformer: Any  # a diffusers ModelMixin: an nn.Module that also saves, loads and takes adapters
    latent_shape: tuple[int, ...]
    lora_targets: list[str]

    def sigmas(self, steps: int) -> Tensor:
        """The family's schedule of ``steps`` denoising steps: float32 [steps + 1], descending, ending in 0."""

    def encode(self, prompts: list[str]) -> Conditioning:
        """Encode prompts; deterministic, without gradient."""

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The ONE forward pass of rollout and training, [N, *latent_shape]; ``sigma`` is [N] in [0, 1].

        That both use it is what makes the first ratio of a policy gradient exactly 1.
        """

    def decode(self, latents: Tensor) -> np.ndarray:
        """Images, uint8 RGB [N, height, width, 3]."""

    def encode_images(self, images: np.ndarray) -> Tensor:
        """Latents [N, *latent_shape] of images, uint8 RGB [N, height, width, 3]: the inverse of ``decode`` up to quantisation.

        Raises:
            ModelError: the images do not have the size of the latents; names both.
        """

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of the transformer, in order: the units of FSDP sharding."""


def default_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
