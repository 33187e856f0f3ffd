"""The Stable Diffusion 3 family (2403.03206): SD3-medium, SD3.5-medium and SD3.5-large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Tokens
from ebbflow.models.pipeline import JOINT_ATTENTION, PipelineModel, dynamic_shift_arguments
from ebbflow.models.published import CLIP_G, CLIP_L, IMAGE_VAE, T5_XXL, Part, Published
from ebbflow.recipe.base_folder import INDEX, read_json_object
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="SD3Model",
    pipeline="StableDiffusion3Pipeline",
    size_multiple=16,
    vllm_omni="ebbflow_vllm_omni.networks:SD3",
    feature_caches=("first_block", "taylor_seer", "mag"),
)
CLIP_TOKENS = 77
"""Tokens that the two CLIP encoders make of every prompt; they come before T5's."""

PUBLISHED: Published = {
    "stabilityai/stable-diffusion-3.5-medium": {
        "transformer": Part(
            "diffusers",
            "SD3Transformer2DModel",
            {
                "num_layers": 24,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "caption_projection_dim": 1536,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
            },
        ),
        "text_encoder": Part("transformers", "CLIPTextModelWithProjection", CLIP_L),
        "text_encoder_2": Part("transformers", "CLIPTextModelWithProjection", CLIP_G),
        "text_encoder_3": T5_XXL,
        "vae": IMAGE_VAE,
    },
}


class SD3Model(PipelineModel):
    """Adapter of ``StableDiffusion3Pipeline``; the T5 encoder may be null in the folder's
    ``model_index.json``.
    """

    pipeline_class = StableDiffusion3Pipeline
    published = PUBLISHED
    # As Flow-GRPO: the attention of the image and of the text stream.
    lora_targets = JOINT_ATTENTION
    text_parts = ("text_encoder", "text_encoder_2", "text_encoder_3")
    default_size = (1024, 1024)
    default_max_tokens = 256

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        # A folder without T5, which is 10 GB: diffusers wants to be told of parts that are missing.
        index = read_json_object(folder / INDEX)
        return {
            part: None
            for part in ("text_encoder_3", "tokenizer_3")
            if index.get(part, [None])[0] is None
        }

    def _compute_latent_shape(self) -> tuple[int, ...]:
        patch = self.transformer.config.patch_size
        scale = self.pipeline.vae_scale_factor
        self._require_multiple(patch * scale)
        return (self.transformer.config.in_channels, self.height // scale, self.width // scale)

    def compute_sigmas(self, steps: int) -> Tensor:
        patch = self.transformer.config.patch_size
        tokens = self.latent_shape[1] // patch * (self.latent_shape[2] // patch)
        # Unlike the newer pipelines, this one passes no sigmas and takes the scheduler's own list.
        # For a scheduler of a fixed shift the further arguments are empty.
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(steps, **dynamic_shift_arguments(scheduler, tokens, max_shift=1.16))
        sigmas: Tensor = scheduler.sigmas.clone()
        return sigmas

    def count_tokens(self) -> Tokens:
        return replace(super().count_tokens(), text=CLIP_TOKENS + self.max_tokens)

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # embeds [n, 77 + L, 4096]: both CLIPs side by side, padded to T5's width, then T5; pooled
        # [n, 2048] of the CLIPs.
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
        )
        return {"embeds": embeds, "pooled": pooled}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            # Never truncated to an integer: rollout and training must agree.
            timestep=1000 * sigma,
            encoder_hidden_states=conditioning["embeds"],
            pooled_projections=conditioning["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)
