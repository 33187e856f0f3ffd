"""CLIP, which measures how near a prompt and an image lie to each other. Several rewards use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from ebbflow.rewards.pixels import resize_with_gradient
from ebbflow.rewards.weights import check_vocabulary, load_network


@dataclass(frozen=True)
class Clip:
    """A CLIP with its tokenizer and its preprocessing, from uint8 RGB [n, height, width, 3] to
    pixel values.

    ``differentiable`` is the same for RGB in [0, 1], [n, 3, height, width], with gradient.
    """

    model: Any
    tokenizer: Any
    pixels: Callable[[np.ndarray], Tensor]
    differentiable: Callable[[Tensor], Tensor]

    def embed_images(self, images: np.ndarray | Tensor) -> Tensor:
        """Return unit vectors, float32 [n, width]; with gradient of RGB in [0, 1], [n, 3, height,
        width].
        """
        # Tensors come from algorithms on the gradient of the reward. The two ways differ in
        # rounding alone: the published preprocessing works on bytes, which pass no gradient.
        if isinstance(images, Tensor):
            pixels = self.differentiable(images)
        else:
            pixels = self.pixels(images).to(self.model.device)
        return normalize(self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def embed_texts(self, texts: list[str]) -> Tensor:
        """Return unit vectors, float32 [n, width]. What is longer than the encoder reads (77
        tokens) is cut, its end token kept.
        """
        # Padded to the full length, so that no row depends on the length of its neighbours.
        tokens = self.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.model.device)
        return normalize(
            self.model.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output,
            dim=-1,
        )

    def compute_cosines(self, images: np.ndarray | Tensor, texts: list[str]) -> Tensor:
        """Return the cosine between each image and its text, float32 [n]."""
        return (self.embed_images(images) * self.embed_texts(texts)).sum(-1)


@cache
def load_clip(folder: Path) -> Clip:
    """Load the CLIP of a folder in the Hugging Face layout; once, however many rewards read from
    it.
    """
    return read_clip(folder)


def read_clip(folder: Path) -> Clip:
    """Read the CLIP of a folder in the Hugging Face layout, for one reward that changes it."""
    processor = CLIPImageProcessorPil.from_pretrained(folder, local_files_only=True)
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    model = load_network(CLIPModel, folder)
    check_vocabulary(tokenizer, model.config.text_config.vocab_size, folder)

    def preprocess_images(images: np.ndarray) -> Tensor:
        values: Tensor = processor(
            list(images), input_data_format="channels_last", return_tensors="pt"
        ).pixel_values
        return values

    # transformers rounds half of an odd margin down, open_clip and torchvision to even.
    differentiable = partial(
        resize_with_gradient, size=model.config.vision_config.image_size, margin=math.floor
    )
    return Clip(model, tokenizer, preprocess_images, differentiable)
