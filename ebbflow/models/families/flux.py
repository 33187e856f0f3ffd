"""The FLUX.1 family: dev, which takes the guidance as an input, and schnell, which takes none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.flow.host_values import copy_ahead
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.packed import PackedPipelineModel, pack_latents
from ebbflow.models.pipeline import JOINT_ATTENTION
from ebbflow.models.published import CLIP_L, IMAGE_VAE, T5_XXL, Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="FluxModel",
    pipeline="FluxPipeline",
    size_multiple=16,
    guided=False,
    vllm_omni="ebbflow_vllm_omni.networks:FLUX",
    feature_caches=("first_block", "taylor_seer", "mag"),
)
FLUX_DEV = {
    "transformer": Part("diffusers", "FluxTransformer2DModel", {"guidance_embeds": True}),
    "text_encoder": Part("transformers", "CLIPTextModel", CLIP_L),
    "text_encoder_2": T5_XXL,
    "vae": IMAGE_VAE,
}


class FluxModel(PackedPipelineModel):
    """Adapter of ``FluxPipeline``."""

    pipeline_class = FluxPipeline
    published: ClassVar[Published] = {"black-forest-labs/FLUX.1-dev": FLUX_DEV}
    # As Flow-GRPO: attention of all blocks, feed-forward of those with two streams.
    lora_targets = [
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    default_size = (1024, 1024)
    guided = FAMILY.guided
    shares_tokens = True

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.guidance != 1 and not pipeline.transformer.config.guidance_embeds:
            raise ModelError(
                f"model.guidance = {config.guidance}: {config.path} takes no guidance, like FLUX.1"
                " schnell; leave it out"
            )

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        return self._encode_texts(texts)

    def _encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        # embeds [n, L, 4096] of T5, all padded to max_tokens; pooled [n, 768] of CLIP. The third is
        # the positions of the text, which are zeros.
        embeds, pooled, _ = self.pipeline.encode_prompt(
            texts, None, device=self.device, max_sequence_length=self.max_tokens
        )
        return {"embeds": embeds, "pooled": pooled}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._call_transformer(
            pack_latents(latents), token_positions(latents), sigma, conditioning
        )

    def _call_transformer(
        self, tokens: Tensor, places: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        # An input of [dev], [N]; [schnell] has none.
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full_like(sigma, conditioning.guidance)
        velocity: Tensor = self.transformer(
            hidden_states=tokens,
            # In [0, 1]: the network itself multiplies it by 1000.
            timestep=sigma,
            guidance=guidance,
            pooled_projections=conditioning["pooled"],
            encoder_hidden_states=conditioning["embeds"],
            txt_ids=places.new_zeros(conditioning["embeds"].shape[1], 3),
            img_ids=places,
            return_dict=False,
        )[0]
        return velocity

    def list_blocks(self) -> list[nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]


def token_positions(latents: Tensor, index: int = 0) -> Tensor:
    """(index of the image, row, column) of every token of latents [N, C, H, W], float32 [H/2 W/2,
    3].
    """
    # Numbers for the rotary embedding. Text is at (0, 0, 0), the image that is generated has index
    # 0, and images to edit have others. Not in the precision of the latents: bfloat16 has no odd
    # number above 256.
    height, width = (side // 2 for side in latents.shape[-2:])
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.full_like(row, index), row, column], -1).reshape(-1, 3)
    return copy_ahead(places.float(), latents.device)
