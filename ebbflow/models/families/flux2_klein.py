"""The FLUX.2 [klein] family, text to image: base models with classifier-free guidance, and distilled ones without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.pipeline import JOINT_ATTENTION, PackedPipelineModel, pack, unpack
from ebbflow.models.published import QWEN3_4B, Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(adapter="Flux2KleinModel", tiny=("flux2_klein",))
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}


def _parts(blocks: tuple[int, int], heads: int, qwen: Mapping[str, Any]) -> Mapping[str, Part]:
    """Of a model with so many blocks of two streams and of one."""
    config = {
        "num_layers": blocks[0],
        "num_single_layers": blocks[1],
        "num_attention_heads": heads,
        "joint_attention_dim": 3 * qwen["hidden_size"],
        "guidance_embeds": False,
    }
    return {
        "transformer": Part("diffusers", "Flux2Transformer2DModel", config),
        "text_encoder": Part("transformers", "Qwen3ForCausalLM", qwen),
        "vae": Part("diffusers", "AutoencoderKLFlux2", {}),
    }


KLEIN_4B, KLEIN_9B = _parts((5, 20), 24, QWEN3_4B), _parts((8, 24), 32, QWEN3_8B)
PUBLISHED: Published = {
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-9B": KLEIN_9B,
    "black-forest-labs/FLUX.2-klein-9B": KLEIN_9B,
}


class Flux2KleinModel(PackedPipelineModel):
    """Adapter of ``Flux2KleinPipeline`` without images to edit; its negative prompt is empty, ours is the prompt table's."""

    pipeline_class = Flux2KleinPipeline
    published = PUBLISHED
    lora_targets = [
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",  # of the blocks with one stream; their "attn.to_out" is a list of layers in the others
    ]
    text_parts = ("text_encoder",)
    default_size = (1024, 1024)

    @classmethod
    def _check(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.guidance != 1 and pipeline.config.is_distilled:
            raise ModelError(
                f"model.guidance = {config.guidance}: {config.path} is distilled and takes no guidance; leave it out, "
                "or take a base model"
            )

    def _shift(self, tokens: int, steps: int) -> dict[str, float]:
        return {"mu": compute_empirical_mu(tokens, steps)}

    def _encode(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(texts, device=self.device, max_sequence_length=self.max_tokens)
        return {"embeds": embeds}

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        _, height, width = self.latent_shape
        velocity: Tensor = self.transformer(
            hidden_states=pack(latents),
            timestep=sigma,
            encoder_hidden_states=conditioning["embeds"],
            txt_ids=_positions(1, 1, conditioning["embeds"].shape[1]).to(latents),
            img_ids=_positions(height // 2, width // 2, 1).to(latents),
            return_dict=False,
        )[0]
        return velocity

    def _to_vae(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return unpack(pack(latents) * std + mean, self.latent_shape)

    def _from_vae(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return unpack((pack(latents) - mean) / std, self.latent_shape)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each of a token's numbers, which the VAE keeps in a batch norm."""
        norm, eps = self.pipeline.vae.bn, self.pipeline.vae.config.batch_norm_eps
        return norm.running_mean.to(like), (norm.running_var + eps).sqrt().to(like)

    def blocks(self) -> list[nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]


def _positions(height: int, width: int, length: int) -> Tensor:
    """(image, row, column, place in the text) of every token of the first image or of the text, [tokens, 4]."""
    return torch.cartesian_prod(*(torch.arange(size) for size in (1, height, width, length)))
