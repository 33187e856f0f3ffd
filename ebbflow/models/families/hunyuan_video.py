"""The HunyuanVideo family (2412.03603), text to video; videos, or images as videos of one frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideoPipeline
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning
from ebbflow.models.pipeline import JOINT_ATTENTION
from ebbflow.models.published import CLIP_L, Part, Published
from ebbflow.models.videos import DrawsVideos
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="HunyuanVideoModel",
    pipeline="HunyuanVideoPipeline",
    size_multiple=16,
    frame_multiple=4,
    guided=False,
    feature_caches=("first_block", "taylor_seer", "mag"),
)
LLAMA_8B = {
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
PUBLISHED: Published = {
    "hunyuanvideo-community/HunyuanVideo": {
        "transformer": Part("diffusers", "HunyuanVideoTransformer3DModel", {}),
        "text_encoder": Part("transformers", "LlamaModel", LLAMA_8B),
        "text_encoder_2": Part("transformers", "CLIPTextModel", CLIP_L),
        "vae": Part("diffusers", "AutoencoderKLHunyuanVideo", {}),
    },
}


class HunyuanVideoModel(DrawsVideos):
    """Adapter of ``HunyuanVideoPipeline``; the network takes the guidance as an input."""

    pipeline_class = HunyuanVideoPipeline
    published = PUBLISHED
    lora_targets = [
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
    text_parts = ("text_encoder", "text_encoder_2")
    default_size = (720, 1280)
    default_max_tokens = 256
    guided = FAMILY.guided

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        # The class that the folder names loses the spaces of the text in transformers 5: it takes
        # Llama 3's pieces for Llama 2's.
        return {
            "tokenizer": PreTrainedTokenizerFast.from_pretrained(
                folder / "tokenizer", local_files_only=True
            )
        }

    def _compute_latent_shape(self) -> tuple[int, ...]:
        config = self.transformer.config
        scale = self.pipeline.vae_scale_factor_spatial
        self._require_multiple(scale * config.patch_size)
        frames = self._count_latent_frames(self.pipeline.vae_scale_factor_temporal)
        return (config.in_channels, frames, self.height // scale, self.width // scale)

    @property
    def frames_per_decode(self) -> int:
        # The VAE decodes long videos in overlapping tiles of this many frames.
        frames: int = self.pipeline.vae.tile_sample_min_num_frames
        return frames

    def token_widths(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads * config.attention_head_dim, config.text_embed_dim

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # embeds [n, L, 4096] of Llama with its mask [n, L], whose system prompt the pipeline cuts
        # off again; pooled [n, 768] of CLIP.
        embeds, pooled, mask = self.pipeline.encode_prompt(
            texts, device=self.device, max_sequence_length=self.max_tokens
        )
        return {"embeds": embeds, "pooled": pooled, "mask": mask.bool()}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # An input, a thousand times the scale, as the pipeline passes it.
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full_like(sigma, 1000 * conditioning.guidance)
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            encoder_attention_mask=conditioning["mask"],
            pooled_projections=conditioning["pooled"],
            guidance=guidance,
            return_dict=False,
        )[0]
        return velocity

    def list_blocks(self) -> list[nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]
