"""Lumina-Image 2.0 (2503.21758)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import Lumina2Pipeline
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.device_forwards import LuminaPositions
from ebbflow.models.pipeline import PipelineModel, dynamic_shift_arguments, match_norm
from ebbflow.models.published import IMAGE_VAE, Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="Lumina2Model",
    pipeline="Lumina2Pipeline",
    size_multiple=16,
)
PUBLISHED: Published = {
    "Alpha-VLLM/Lumina-Image-2.0": {
        "transformer": Part("diffusers", "Lumina2Transformer2DModel", {"cap_feat_dim": 2304}),
        "text_encoder": Part("transformers", "Gemma2Model", {}),
        "vae": IMAGE_VAE,
    },
}


class Lumina2Model(PipelineModel):
    """Adapter of ``Lumina2Pipeline``: guidance keeps the norm of the prompt's prediction, and is in
    every step.

    The image's positions begin after the prompt. The network pads the rows of a pass to the longest
    prompt of them, so that a row's last bits depend on the other rows of its batch.
    """

    pipeline_class = Lumina2Pipeline
    published = PUBLISHED
    lora_targets = [f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")]
    text_parts = ("text_encoder",)
    default_size = (1024, 1024)
    default_max_tokens = 256

    def __init__(self, pipeline: Any, config: ModelConfig, device: torch.device) -> None:
        super().__init__(pipeline, config, device)
        self.transformer.rope_embedder.__class__ = LuminaPositions

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        limit = pipeline.transformer.config.axes_lens[0] - 1
        if config.max_tokens is not None and config.max_tokens > limit:
            raise ModelError(
                f"model.max_tokens = {config.max_tokens}: the network has positions for {limit} at"
                " most; leave it out"
            )

    def _compute_latent_shape(self) -> tuple[int, ...]:
        # Latents in, latents out: the network itself makes tokens of patches.
        patch = self.transformer.config.patch_size
        scale = self.pipeline.vae_scale_factor
        self._require_multiple(patch * scale)
        return (self.transformer.config.in_channels, self.height // scale, self.width // scale)

    def token_widths(self) -> tuple[int, int]:
        return self.transformer.config.hidden_size, self.transformer.config.cap_feat_dim

    def _schedule_arguments(self, tokens: int, steps: int) -> dict[str, float]:
        # The pipeline takes the number of channels for that of the tokens: its latents are
        # [N, C, H, W], and calculate_shift gets shape[1], as if they were packed.
        return dynamic_shift_arguments(self.pipeline.scheduler, self.latent_shape[0])

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # False: without negative prompts, which would be empty here.
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            texts, False, device=self.device, max_sequence_length=self.max_tokens
        )
        return {"embeds": embeds, "mask": mask.bool()}

    def _encode_negative_inputs(
        self, texts: list[str], prompts: Sequence[Prompt]
    ) -> dict[str, Tensor]:
        # Without the system prompt, which encode_prompt puts before every prompt.
        embeds, mask = self.pipeline._get_gemma_prompt_embeds(texts, self.device, self.max_tokens)
        return {"embeds": embeds, "mask": mask.bool()}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            # Time runs from noise to image, and so does the prediction, x0 - eps: hence the sign.
            timestep=1 - sigma,
            encoder_hidden_states=conditioning["embeds"],
            encoder_attention_mask=conditioning["mask"],
            return_dict=False,
        )[0]
        return -velocity

    def _apply_guidance(
        self, prediction: Tensor, negative: Tensor, guidance: float | Tensor
    ) -> Tensor:
        # As the pipeline: the norm over the last dimension, one for each row of each channel.
        return match_norm(super()._apply_guidance(prediction, negative, guidance), prediction)

    def list_blocks(self) -> list[nn.Module]:
        # In the order of their calls, which fsdp.prefetch needs.
        network = self.transformer
        return [*network.context_refiner, *network.noise_refiner, *network.layers]
