"""Wan2.2-I2V-A14B: a video that begins with the prompt's image; one of its two transformers is
trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from torch import Tensor, nn

from ebbflow.models.base import Conditioning, Tokens
from ebbflow.models.editing import EditsImages
from ebbflow.models.families.wan import WanModel
from ebbflow.models.families.wan_a14b import OTHERS, WanA14BModel
from ebbflow.models.published import Part
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="WanI2VModel",
    pipeline="WanImageToVideoPipeline",
    size_multiple=16,
    frame_multiple=4,
    edits_images=True,
    experts=True,
    feature_caches=("first_block", "taylor_seer"),
)
NETWORK = Part("diffusers", "WanTransformer3DModel", {"in_channels": 36}, bytes=4)


class AnimatesImages(EditsImages, WanModel):
    """Adapter of ``WanImageToVideoPipeline``; images are scaled to the size of the video.

    Beside its latents the network sees those of a video of the images and grey between them, and a
    mask of the frames that are given.
    """

    pipeline_class = WanImageToVideoPipeline

    def _compute_latent_shape(self) -> tuple[int, ...]:
        # The network's channels are those of the latents, the mask and the image together.
        return (self.pipeline.vae.config.z_dim, *super()._compute_latent_shape()[1:])

    def count_tokens(self) -> Tokens:
        channels = self.transformer.config.in_channels - self.latent_shape[0]
        return replace(
            super().count_tokens(), condition_channels=channels * math.prod(self.latent_shape[1:])
        )

    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        # Every image becomes a frame, whatever its proportions.
        return self.width, self.height

    def _encode_frames(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Mask and latents of a video that begins with the first picture and ends with the second
        one, if there is one, [1, 4 + 16, latent frames, h, w].
        """
        first, *last = (
            self.pipeline.video_processor.preprocess(
                picture, height=self.height, width=self.width
            ).to(self.device)[:, :, None]
            for picture in pictures
        )
        # [1, 3, frames, H, W]: between them frames of zeros, which are grey.
        num_grey = self.config.frames - 1 - len(last)
        grey = first.new_zeros(1, 3, num_grey, self.height, self.width)
        video = torch.cat([first, grey, *last], 2)
        latents = self._scale_latents(self.pipeline.vae.encode(video).latent_dist.mode())
        # Of a latent frame, which of its four frames are given. The first one stands for a single
        # frame, which the pipeline counts four times.
        mask = latents.new_zeros(1, self.pipeline.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        if last:
            mask[:, -1, -1] = 1
        return torch.cat([mask, latents], 1)

    def _encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        # Text to video's, which is the same and does without ftfy, where the pipeline's own fails
        # unless it is installed.
        encode = WanPipeline._get_t5_prompt_embeds
        return {
            "embeds": encode(
                self.pipeline, texts, max_sequence_length=self.max_tokens, device=self.device
            )
        }


class WanI2VModel(AnimatesImages, WanA14BModel):
    """Adapter of ``WanImageToVideoPipeline`` with two transformers."""

    published = {
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": OTHERS
        | {"transformer": NETWORK, "transformer_2": NETWORK}
    }
    text_parts = ("text_encoder", "vae")

    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        return Conditioning(self._encode_texts([text]) | {"image": self._encode_frames(pictures)})

    def _call_expert(
        self, network: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        # [N, 16 + 4 + 16, F, h, w]: latents, mask, latents of the image.
        inputs = torch.cat([latents, conditioning["image"].to(latents)], 1)
        return super()._call_expert(network, inputs, sigma, conditioning)
