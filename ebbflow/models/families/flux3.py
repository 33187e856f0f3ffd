"""FLUX.3, text to image: a family that diffusers has as a modular pipeline alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import Flux3AutoBlocks, Flux3ModularPipeline
from torch import Tensor, nn

from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.equal_lengths import run_by_length
from ebbflow.models.families.flux2 import TextProcessor
from ebbflow.models.modular import ModularModel
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="Flux3Model",
    pipeline="Flux3ModularPipeline",
    folder_files=("modular_model_index.json",),
    modular=True,
    caveat="its pipeline has a large language model rewrite the prompt first (prompt_upsampler);"
    " training, rewards and evaluation generate from the prompt as it is",
)


class Flux3Model(ModularModel):
    """Adapter of ``Flux3ModularPipeline`` without images to edit and without its rewriting of
    prompts.
    """

    pipeline_class = Flux3ModularPipeline
    blocks_class = Flux3AutoBlocks
    workflow = "text2image"
    skipped_blocks = ("prompt_upsampler",)
    preparing_blocks = (
        "denoise.input",
        "denoise.prepare_latents",
        "denoise.prepare_rope_inputs",
    )
    lora_targets = [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "ff.linear_in",
        "ff.linear_out",
    ]
    text_parts = ("text_encoder",)
    default_size = (1024, 1024)
    default_max_tokens = 8192
    # The network rounds its time to the precision of the latents. Under autocast they are float32.
    runs_without_autocast = False
    # Of images to edit.
    unused_parameters = (
        "mode_blocks.image_cond.*",
        "x_embedders.image_cond*",
        "early_stream_modulations.image_cond.*",
        "single_stream_modulations.image_cond.*",
    )

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if pipeline.transformer.config.flow_map:
            raise ModelError(
                f"{config.path} is distilled to few steps: its network is told where a step ends,"
                " which no sampler here says; take the base model"
            )

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        # transformers' own processor would need torchvision, for images that none is shown.
        return {"tokenizer": TextProcessor.from_folder(folder)}

    def _compute_latent_shape(self) -> tuple[int, ...]:
        scale = 2 * self.pipeline.vae_scale_factor
        self._require_multiple(scale)
        return (self.pipeline.num_channels_latents, self.height // scale, self.width // scale)

    @property
    def vae_latent_shape(self) -> tuple[int, ...]:
        """A sample as the VAE has it: a token is 2 x 2 of its latents."""
        channels, rows, columns = self.latent_shape
        return channels // 4, 2 * rows, 2 * columns

    def token_widths(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads * config.attention_head_dim, config.joint_attention_dim

    def _encode_prompt(self, text: str) -> dict[str, Tensor]:
        # embeds [1, L, 20480], several layers of Qwen3-VL beside each other; L is a multiple of 80.
        state = self._run_blocks(
            self.encoding_blocks, prompt=text, max_sequence_length=self.max_tokens
        )
        embeds = state.get("prompt_embeds")
        return {"embeds": embeds, "mask": torch.ones_like(embeds[:, :, 0], dtype=torch.bool)}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # The network attends to the padding of a prompt, and takes no mask. A prompt fills a number
        # of windows of 80 tokens.
        return run_by_length(
            self.transformer, latents, sigma, conditioning, self._run_equal_lengths
        )

    def _run_equal_lengths(self, latents: Tensor, sigma: Tensor, embeds: Tensor) -> Tensor:
        inputs = self._prepare_inputs(latents, prompt_embeds=embeds)
        velocity: Tensor = self.transformer(
            # Not as the block casts them: in 16 bits the time would be rounded with them.
            hidden_states=latents.flatten(2).mT,
            encoder_hidden_states=embeds,
            timestep=sigma,
            img_ids=inputs["img_ids"],
            txt_ids=inputs["txt_ids"],
            return_dict=False,
        )[0]
        return velocity.mT.reshape(latents.shape)

    def _scale_latents(self, latents: Tensor) -> Tensor:
        """Latents of the VAE as tokens of 2 x 2, [n, 128, rows, columns], normalised."""
        tokens = nn.functional.pixel_unshuffle(latents, 2)
        norm = self.pipeline.vae.bn
        std = (norm.running_var + self.pipeline.vae.config.batch_norm_eps).sqrt()
        shape = (-1, 1, 1)
        scaled: Tensor = (tokens - norm.running_mean.view(shape)) / std.view(shape)
        return scaled

    def list_blocks(self) -> list[nn.Module]:
        network = self.transformer
        return [
            *network.txt_mode_blocks,
            *network.mode_blocks["image"],
            *network.single_transformer_blocks,
        ]
