"""Wan2.1-FLF2V-14B: a video that begins with the first image of the prompt and ends with the second
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.families.wan_a14b import OTHERS
from ebbflow.models.families.wan_i2v import AnimatesImages
from ebbflow.models.published import Part
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="WanFLF2VModel",
    pipeline="WanImageToVideoPipeline",
    edits_images=True,
    min_images=2,
    max_images=2,
    feature_caches=("first_block", "taylor_seer"),
)
CLIP_VISION_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
NETWORK = Part(
    "diffusers",
    "WanTransformer3DModel",
    {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
    bytes=4,
)


class WanFLF2VModel(AnimatesImages):
    """Adapter of ``WanImageToVideoPipeline`` with a first and a last image, which the network also
    sees as CLIP does.
    """

    published = {
        "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": OTHERS
        | {
            "transformer": NETWORK,
            "image_encoder": Part("transformers", "CLIPVisionModel", CLIP_VISION_H),
        }
    }
    text_parts = ("text_encoder", "image_encoder", "vae")
    default_size = (720, 1280)
    min_images = FAMILY.min_images
    max_images = FAMILY.max_images

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if not pipeline.transformer or not pipeline.transformer.config.pos_embed_seq_len:
            raise ModelError(
                f"{config.path} is no Wan2.1-FLF2V: its network has no places for two images;"
                " family wan_i2v takes Wan2.2-I2V-A14B"
            )

    def _compute_latent_shape(self) -> tuple[int, ...]:
        if self.config.frames == 1:
            raise ModelError(
                "model.frames = 1: wan_flf2v draws a video between a first and a last frame; take"
                " 81"
            )
        return super()._compute_latent_shape()

    def count_tokens(self) -> Tokens:
        tokens = super().count_tokens()
        # Both images as CLIP sees them.
        config = self.transformer.config
        seen = config.pos_embed_seq_len * config.image_dim
        return replace(tokens, condition_channels=tokens.condition_channels + seen)

    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        # [2, 257, 1280] of the first and the last image, as one row: [1, 514, 1280].
        seen = self.pipeline.encode_image(list(pictures), self.device)
        return Conditioning(
            self._encode_texts([text])
            | {"image": self._encode_frames(pictures), "seen": seen.reshape(1, -1, seen.shape[-1])}
        )

    def _call_expert(
        self, network: Any, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        seen = conditioning["seen"]
        velocity: Tensor = network(
            # [N, 16 + 4 + 16, F, h, w]: latents, mask, latents of the images.
            hidden_states=torch.cat([latents, conditioning["image"].to(latents)], 1),
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            # The network joins two rows to one.
            encoder_hidden_states_image=seen.reshape(2 * len(seen), -1, seen.shape[-1]),
            return_dict=False,
        )[0]
        return velocity
