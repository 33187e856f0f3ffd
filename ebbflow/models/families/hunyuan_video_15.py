"""HunyuanVideo-1.5 (2511.18870), text to video; videos, or images as videos of one frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ClassifierFreeGuidance, HunyuanVideo15Pipeline
from diffusers.loaders import HunyuanVideoLoraLoaderMixin
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.device_forwards import replace_forward, run_text_to_video
from ebbflow.models.families.qwen_image import QWEN_VL_7B
from ebbflow.models.pipeline import JOINT_ATTENTION
from ebbflow.models.published import Part, Published
from ebbflow.models.videos import DrawsVideos
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="HunyuanVideo15Model",
    pipeline="HunyuanVideo15Pipeline",
    size_multiple=16,
    frame_multiple=4,
    feature_caches=("taylor_seer",),
)
PLAIN_GUIDER = {
    "guidance_rescale": 0.0,
    "use_original_formulation": False,
    "start": 0.0,
    "stop": 1.0,
    "enabled": True,
}
"""Settings of the pipeline's ``ClassifierFreeGuidance`` with which it computes what we do."""
BYT5_SMALL = {
    # With the colours and fonts that Glyph-SDXL-v2 adds.
    "vocab_size": 1510,
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_layers": 12,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
PARTS = {
    "transformer": Part("diffusers", "HunyuanVideo15Transformer3DModel", {}),
    "text_encoder": Part("transformers", "Qwen2_5_VLTextModel", QWEN_VL_7B["text_config"]),
    "text_encoder_2": Part("transformers", "T5EncoderModel", BYT5_SMALL),
    "vae": Part("diffusers", "AutoencoderKLHunyuanVideo15", {}),
}
PUBLISHED: Published = {
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": PARTS,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v": PARTS,
}


class HunyuanVideo15Model(DrawsVideos):
    """Adapter of ``HunyuanVideo15Pipeline``: a second text encoder reads the quoted text of a
    prompt, byte by byte.
    """

    pipeline_class = HunyuanVideo15Pipeline
    # The pipeline has no functions for LoRA; the layers are named as those of the first version.
    lora_class = HunyuanVideoLoraLoaderMixin
    published = PUBLISHED
    lora_targets = [
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
    text_parts = ("text_encoder", "text_encoder_2")
    default_size = (480, 848)
    default_max_tokens = 1000
    # The network embeds its time in the precision of the time, which is float32.
    runs_without_autocast = False
    # Text to video multiplies what it makes of an image by zero.
    unused_parameters = ("image_embedder.*",)

    def __init__(self, pipeline: Any, config: ModelConfig, device: torch.device) -> None:
        super().__init__(pipeline, config, device)
        replace_forward(self.transformer, run_text_to_video)

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        guider = pipeline.guider
        # Another guider, or another range of steps, would not be what we compute.
        changed = [
            f"{key} = {guider.config.get(key)!r}"
            for key, default in PLAIN_GUIDER.items()
            if guider.config.get(key) != default
        ]
        if type(guider) is not ClassifierFreeGuidance or changed:
            named = ", ".join([type(guider).__name__, *changed])
            raise ModelError(
                f"{config.path} has the guider {named}; {config.family} takes"
                " ClassifierFreeGuidance with no setting but its scale"
            )

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = self.pipeline.vae_scale_factor_spatial
        self._require_multiple(scale * self.transformer.config.patch_size)
        frames = self._count_latent_frames(self.pipeline.vae_scale_factor_temporal)
        channels = self.pipeline.num_channels_latents
        return (channels, frames, self.height // scale, self.width // scale)

    @property
    def frames_per_decode(self) -> int:
        # The VAE decodes a video in one piece.
        return self.config.frames

    def count_tokens(self) -> Tokens:
        image = math.prod(self.latent_shape[1:]) // self.transformer.config.patch_size**2
        return Tokens(image=image, text=self.max_tokens + self.pipeline.tokenizer_2_max_length)

    def token_widths(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads * config.attention_head_dim, config.text_embed_dim

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        pipeline = self.pipeline
        # embeds [n, L, 3584] of Qwen2.5-VL, without its system prompt; quoted [n, 256, 1472] of
        # ByT5, zeros where a prompt quotes nothing. Both with their masks.
        embeds, mask = pipeline._get_mllm_prompt_embeds(
            pipeline.text_encoder,
            pipeline.tokenizer,
            texts,
            self.device,
            tokenizer_max_length=self.max_tokens,
            system_message=pipeline.system_message,
            crop_start=pipeline.prompt_template_encode_start_idx,
        )
        quoted, quoted_mask = pipeline._get_byt5_prompt_embeds(
            pipeline.tokenizer_2,
            pipeline.text_encoder_2,
            texts,
            self.device,
            tokenizer_max_length=pipeline.tokenizer_2_max_length,
        )
        return {
            "embeds": embeds,
            "mask": mask.bool(),
            "quoted": quoted,
            "quoted_mask": quoted_mask.bool(),
        }

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # [N, 32 + 32 + 1, F, h, w]: the latents, and zeros for those of an image and for the mask
        # of its frame.
        channels = self.transformer.config.in_channels - latents.shape[1]
        image = latents.new_zeros(len(latents), channels, *latents.shape[2:])
        velocity: Tensor = self.transformer(
            hidden_states=torch.cat([latents, image], 1),
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            encoder_attention_mask=conditioning["mask"],
            encoder_hidden_states_2=conditioning["quoted"],
            encoder_attention_mask_2=conditioning["quoted_mask"],
            # No token of an image, where the pipeline has 729 of zeros that attention masks.
            image_embeds=conditioning["embeds"].new_zeros(
                len(latents), 0, self.transformer.config.image_embed_dim
            ),
            return_dict=False,
        )[0]
        return velocity

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        # One at a time: the mask of the VAE's attention does not fit a batch of more.
        decode = super()._decode_pixels
        return torch.cat([decode(row) for row in latents.split(1)])

    def _encode_with_vae(self, pixels: Tensor) -> Tensor:
        encode = super()._encode_with_vae
        return torch.cat([encode(row) for row in pixels.split(1)])

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``; the folder's guider has our scale, since its
        pipeline is given none.
        """
        self.pipeline.register_modules(
            guider=ClassifierFreeGuidance(guidance_scale=self.config.guidance)
        )
        super().save(folder)
