"""FLUX.1 Kontext (2506.15742): editing an image by text, with the network of FLUX.1 dev."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from diffusers import FluxKontextPipeline
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image
from torch import Tensor

from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.editing import EditsImages
from ebbflow.models.families.flux import FLUX_DEV, FluxModel, token_positions
from ebbflow.models.packed import pack_latents
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="FluxKontextModel",
    pipeline="FluxKontextPipeline",
    size_multiple=16,
    guided=False,
    edits_images=True,
    feature_caches=("first_block", "taylor_seer", "mag"),
)


class FluxKontextModel(EditsImages, FluxModel):
    """Adapter of ``FluxKontextPipeline``: the network sees the prompt table's ``image`` as further
    tokens, not denoised.

    Unlike the pipeline it draws the size that it is asked for, and not about a megapixel of these
    proportions.
    """

    pipeline_class = FluxKontextPipeline
    published = {"black-forest-labs/FLUX.1-Kontext-dev": FLUX_DEV}
    text_parts = ("text_encoder", "text_encoder_2", "vae")

    def count_tokens(self) -> Tokens:
        # At most, over the sizes that images may be scaled to.
        plain = super().count_tokens()
        multiple = 2 * self.pipeline.vae_scale_factor
        sizes = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
        return replace(
            plain, edited=max(width // multiple * (height // multiple) for width, height in sizes)
        )

    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        """The size of a megapixel, among those that the model was trained on, whose proportions are
        nearest.
        """
        # Of the edges cut to multiples, as the pipeline measures them: near the middle between two
        # sizes, those of the picture itself would choose another one.
        rows, columns = self.pipeline.image_processor.get_default_height_width(picture)
        if not rows * columns:
            raise ModelError(
                f"an image to edit has {picture.width} x {picture.height} pixels, and the pipeline"
                " takes none with an edge below 16; take another image"
            )
        ratio = columns / rows
        multiple = 2 * self.pipeline.vae_scale_factor
        sizes = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
        _, width, height = min(
            (abs(ratio - width / height), width, height) for width, height in sizes
        )
        return width // multiple * multiple, height // multiple * multiple

    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        # The pipeline takes a list for a batch, and of it the first.
        (picture,) = pictures
        width, height = self._scaled_size(picture)
        processor = self.pipeline.image_processor
        # Resized by itself first, as the pipeline does; preprocess then only normalises.
        pixels = processor.preprocess(processor.resize(picture, height, width), height, width).to(
            self.device
        )
        latents = self._scale_latents(self.pipeline.vae.encode(pixels).latent_dist.mode())
        return Conditioning(self._encode_texts([text]) | {"image": latents})

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # [N, S, 4 C]: the tokens of the latents, with index 0, then those of the image, with 1.
        tokens = pack_latents(latents)
        image = conditioning["image"]
        places = torch.cat([token_positions(latents), token_positions(image, index=1)])
        prediction = self._call_transformer(
            torch.cat([tokens, pack_latents(image).to(tokens)], 1), places, sigma, conditioning
        )
        # What it predicts of the image to edit is no velocity of anything.
        return prediction[:, : tokens.shape[1]]
