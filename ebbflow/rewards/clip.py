"""``pickscore`` and ``clipscore``: how near a prompt and an image lie to each other under a CLIP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from ebbflow.rewards.network import Files, NetworkReward, Score, check_vocabulary, load_network

CLIP_FILES = ("config.json", "model*.safetensors", "*processor_config.json", "tokenizer.json")
PICKSCORE_UNIT = 26.0
"""What Flow-GRPO (2505.05470) divides PickScore by, to bring it near 1."""


@dataclass(frozen=True)
class Clip:
    """A CLIP with its tokenizer and its preprocessing, from uint8 RGB [n, height, width, 3] to pixel values."""

    model: Any
    tokenizer: Any
    pixels: Callable[[np.ndarray], Tensor]

    def embed_images(self, images: np.ndarray) -> Tensor:
        """Unit vectors, float32 [n, width]."""
        pixels = self.pixels(images).to(self.model.device)
        return normalize(self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def embed_texts(self, texts: list[str]) -> Tensor:
        """Unit vectors, float32 [n, width]. What is longer than the encoder reads (77 tokens) is cut, its end token kept."""
        # Padded to the full length, so that no row depends on the length of its neighbours.
        tokens = self.tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.model.device)
        return normalize(self.model.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output, dim=-1)

    def cosines(self, images: np.ndarray, texts: list[str]) -> Tensor:
        """Of each image and its text, float32 [n]."""
        return (self.embed_images(images) * self.embed_texts(texts)).sum(-1)


@cache
def load_clip(folder: Path) -> Clip:
    """The CLIP of a folder in the Hugging Face layout; loaded once, however many rewards read from it."""
    processor = CLIPImageProcessorPil.from_pretrained(folder, local_files_only=True)
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    model = load_network(CLIPModel, folder)
    check_vocabulary(tokenizer, model.config.text_config.vocab_size, folder)

    def pixels(images: np.ndarray) -> Tensor:
        return processor(list(images), input_data_format="channels_last", return_tensors="pt").pixel_values

    return Clip(model, tokenizer, pixels)


class ClipScore(NetworkReward):
    """cos(image, prompt); CLIPScore (2104.08718) is 2.5 times its positive part."""

    def files(self) -> list[Files]:
        return [Files(self.config, CLIP_FILES)]

    def load(self) -> Score:
        return load_clip(self.files()[0].folder()).cosines


class PickScore(ClipScore):
    """exp(logit scale) * cos(image, prompt) / 26 (2305.01569, scaled as in 2505.05470)."""

    def load(self) -> Score:
        clip = load_clip(self.files()[0].folder())
        scale = clip.model.logit_scale.exp() / PICKSCORE_UNIT
        return lambda images, texts: scale * clip.cosines(images, texts)
