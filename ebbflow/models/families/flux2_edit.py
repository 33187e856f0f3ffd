"""Editing an image by text with FLUX.2 [dev]."""

from __future__ import annotations

from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.editing import EditsImages
from ebbflow.models.families.flux2 import Flux2Model, positions
from ebbflow.models.pipeline import pack
from ebbflow.recipe.families import Family

FAMILY = Family(adapter="Flux2EditModel", guided=False, edits_images=True, tiny=("flux2_edit",))
MAX_PIXELS = 1024 * 1024
"""The pipeline scales larger images to edit down to about so many."""


class Flux2EditModel(EditsImages, Flux2Model):
    """Adapter of ``Flux2Pipeline`` with one image: the network sees the prompt table's ``image`` as
    further tokens.

    It draws the size that it is asked for, whatever the size of the image.
    """

    text_parts = ("text_encoder", "vae")

    def tokens(self) -> Tokens:
        return replace(
            super().tokens(), edited=MAX_PIXELS // (2 * self.pipeline.vae_scale_factor) ** 2
        )

    def _scaled(self, picture: Image.Image) -> tuple[int, int]:
        width, height = self._shrunk(picture).size
        multiple = 2 * self.pipeline.vae_scale_factor
        return width // multiple * multiple, height // multiple * multiple

    def _shrunk(self, picture: Image.Image) -> Image.Image:
        processor = self.pipeline.image_processor
        try:
            processor.check_image_input(picture)
        except ValueError as error:
            raise ModelError(f"an image to edit is refused: {error}; take another image") from None
        smaller: Image.Image = processor._resize_if_exceeds_area(picture, MAX_PIXELS)
        return smaller

    def _encode_edit(self, text: str, picture: Image.Image) -> Conditioning:
        width, height = self._scaled(picture)
        processor = self.pipeline.image_processor
        pixels = processor.preprocess(
            self._shrunk(picture), height=height, width=width, resize_mode="crop"
        ).to(self.device)
        return Conditioning(
            self._encode_texts([text]) | {"image": self._from_vae(self._vae_latents(pixels))}
        )

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        tokens = pack(latents)
        image = conditioning["image"]
        places = torch.cat(
            [positions(latents), positions(image, image=10)]
        )  # ten between the first images, as published
        prediction = self._network(
            torch.cat([tokens, pack(image).to(tokens)], 1), places, sigma, conditioning
        )
        return prediction[:, : tokens.shape[1]]
