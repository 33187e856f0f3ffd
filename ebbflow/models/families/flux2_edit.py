"""Editing an image by text with FLUX.2 [dev]."""

from __future__ import annotations

from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.editing import EditsImages
from ebbflow.models.families.flux2 import Flux2Model, token_positions
from ebbflow.models.pipeline import pack_latents
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="Flux2EditModel",
    guided=False,
    edits_images=True,
    feature_caches=("taylor_seer", "mag"),
)
MAX_PIXELS = 1024 * 1024
"""The pipeline scales larger images to edit down to about so many."""


class Flux2EditModel(EditsImages, Flux2Model):
    """Adapter of ``Flux2Pipeline`` with one image: the network sees the prompt table's ``image`` as
    further tokens.

    It draws the size that it is asked for, whatever the size of the image.
    """

    text_parts = ("text_encoder", "vae")
    # The image to edit has any number of tokens, which may not divide.
    shares_tokens = False

    def count_tokens(self) -> Tokens:
        # At most: a smaller image stays as it is.
        return replace(
            super().count_tokens(), edited=MAX_PIXELS // (2 * self.pipeline.vae_scale_factor) ** 2
        )

    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        # As Flux2Pipeline scales: down to whole tokens, and what is over is cropped.
        width, height = self._shrink_picture(picture).size
        multiple = 2 * self.pipeline.vae_scale_factor
        return width // multiple * multiple, height // multiple * multiple

    def _shrink_picture(self, picture: Image.Image) -> Image.Image:
        processor = self.pipeline.image_processor
        # The processor refuses images that are very small or very long.
        try:
            processor.check_image_input(picture)
        except ValueError as error:
            raise ModelError(f"an image to edit is refused: {error}; take another image") from None
        smaller: Image.Image = processor._resize_if_exceeds_area(picture, MAX_PIXELS)
        return smaller

    def _encode_edit_prompt(self, text: str, picture: Image.Image) -> Conditioning:
        width, height = self._scaled_size(picture)
        processor = self.pipeline.image_processor
        pixels = processor.preprocess(
            self._shrink_picture(picture), height=height, width=width, resize_mode="crop"
        ).to(self.device)
        return Conditioning(
            self._encode_texts([text])
            | {"image": self._scale_latents(self._encode_with_vae(pixels))}
        )

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # [N, S, 4 C]: the tokens of the latents, then those of the image to edit.
        tokens = pack_latents(latents)
        image = conditioning["image"]
        # Ten between the first images, as published.
        places = torch.cat([token_positions(latents), token_positions(image, image=10)])
        prediction = self._call_transformer(
            torch.cat([tokens, pack_latents(image).to(tokens)], 1), places, sigma, conditioning
        )
        # What it predicts of the image to edit is no velocity of anything.
        return prediction[:, : tokens.shape[1]]
