"""Editing images by text with FLUX.2 [dev]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor

from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.editing import EditsImages, list_images, name_images
from ebbflow.models.families.flux2 import Flux2Model, token_positions
from ebbflow.models.packed import pack_latents
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="Flux2EditModel",
    pipeline="Flux2Pipeline",
    size_multiple=16,
    guided=False,
    edits_images=True,
    max_images=None,
    feature_caches=("taylor_seer", "mag"),
)
MAX_PIXELS = 1024 * 1024
"""The pipeline scales larger images to edit down to about so many."""


class Flux2EditModel(EditsImages, Flux2Model):
    """Adapter of ``Flux2Pipeline`` with images to edit: the network sees those of the prompt
    table's ``image`` as further tokens.

    It draws the size that it is asked for, whatever the size of the image.
    """

    min_images = FAMILY.min_images
    max_images = FAMILY.max_images
    text_parts = ("text_encoder", "vae")

    def count_tokens(self) -> Tokens:
        # Of one image, at most: a smaller image stays as it is.
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

    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        processor = self.pipeline.image_processor
        latents = []
        for picture in pictures:
            width, height = self._scaled_size(picture)
            pixels = processor.preprocess(
                self._shrink_picture(picture), height=height, width=width, resize_mode="crop"
            ).to(self.device)
            latents.append(self._scale_latents(self._encode_with_vae(pixels)))
        return Conditioning(self._encode_texts([text]) | name_images(latents))

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # [N, S, 4 C]: the tokens of the latents, then those of the images to edit.
        tokens = pack_latents(latents)
        images = list_images(conditioning)
        # Ten between one image and the next, as published.
        places = [
            token_positions(image, image=10 * index)
            for index, image in enumerate((latents, *images))
        ]
        edited = [pack_latents(image).to(tokens) for image in images]
        prediction = self._call_transformer(
            torch.cat([tokens, *edited], 1), torch.cat(places), sigma, conditioning
        )
        # What it predicts of the images to edit is no velocity of anything.
        return prediction[:, : tokens.shape[1]]
