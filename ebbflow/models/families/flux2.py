"""The FLUX.2 family: dev, text to image, which takes the guidance as an input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, ProcessorMixin

from ebbflow.data.prompts import Prompt
from ebbflow.flow.host_values import copy_ahead
from ebbflow.models.base import Conditioning
from ebbflow.models.folder import copy_published_part, report_unreadable_parts
from ebbflow.models.packed import PackedPipelineModel, pack_latents, unpack_tokens
from ebbflow.models.pipeline import JOINT_ATTENTION
from ebbflow.models.published import Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="Flux2Model",
    pipeline="Flux2Pipeline",
    size_multiple=16,
    guided=False,
    vllm_omni="ebbflow_vllm_omni.networks:FLUX2",
    feature_caches=("taylor_seer", "mag"),
)
FLUX2_VAE = Part("diffusers", "AutoencoderKLFlux2", {})
FLUX2_DEV = {
    "transformer": Part("diffusers", "Flux2Transformer2DModel", {}),
    "text_encoder": Part(
        "transformers", "Mistral3ForConditionalGeneration", {"tie_word_embeddings": False}
    ),
    "vae": FLUX2_VAE,
}


# mypy cannot follow transformers' lazy modules.
class TextProcessor(ProcessorMixin):  # type: ignore[misc, unused-ignore]
    """The text encoder's processor without its part for images, which none is shown and which would
    need torchvision.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None
    ) -> None:
        super().__init__(tokenizer, chat_template=chat_template or tokenizer.chat_template)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """That of a pipeline's folder."""
        return cls(AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True))


class Flux2Backbone(PackedPipelineModel):
    """What dev and [klein] share: the network, the schedule, and a VAE whose statistics are those
    of a batch norm.
    """

    lora_targets = [
        *JOINT_ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        # Of the blocks with one stream; their "attn.to_out" is a list of layers in the others.
        "attn.to_qkv_mlp_proj",
    ]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_size = (1024, 1024)
    # The network begins by rounding its time, in thousandths, to the precision of the latents:
    # bfloat16 has steps of 4 there. Under autocast they are float32.
    runs_without_autocast: ClassVar[bool] = False

    def _schedule_arguments(self, tokens: int, steps: int) -> dict[str, float]:
        # A fit to tokens and steps, instead of the line of dynamic_shift_arguments.
        return {"mu": compute_empirical_mu(tokens, steps)}

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        return self._encode_texts(texts)

    def _encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            texts, device=self.device, max_sequence_length=self.max_tokens
        )
        return {"embeds": embeds}

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._call_transformer(
            pack_latents(latents), token_positions(latents), sigma, conditioning
        )

    def _call_transformer(
        self, tokens: Tensor, places: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full_like(sigma, conditioning.guidance)
        # Positions have four axes: (image, row, column, place in the text). Text is at
        # (0, 0, 0, place), [L, 4]; the batch has one list for all rows, hence the [None].
        zero = torch.arange(1)
        places_in_text = torch.arange(conditioning["embeds"].shape[1])
        text_positions = torch.cartesian_prod(zero, zero, zero, places_in_text)
        velocity: Tensor = self.transformer(
            hidden_states=tokens,
            timestep=sigma,
            guidance=guidance,
            encoder_hidden_states=conditioning["embeds"],
            txt_ids=copy_ahead(text_positions.to(places.dtype), places.device)[None],
            img_ids=places[None],
            return_dict=False,
        )[0]
        return velocity

    def _unscale_latents(self, latents: Tensor) -> Tensor:
        # The statistics are those of a token's 4 C numbers, not of C channels, so that latents are
        # packed for them and unpacked again.
        mean, std = self._channel_statistics(latents)
        return unpack_tokens(pack_latents(latents) * std + mean, tuple(latents.shape[1:]))

    def _scale_latents(self, latents: Tensor) -> Tensor:
        mean, std = self._channel_statistics(latents)
        return unpack_tokens((pack_latents(latents) - mean) / std, tuple(latents.shape[1:]))

    def _channel_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each of a token's numbers, which the VAE keeps in a batch
        norm.
        """
        # [4 C] each, in the running estimates of the norm's training.
        norm = self.pipeline.vae.bn
        eps = self.pipeline.vae.config.batch_norm_eps
        return norm.running_mean.to(like), (norm.running_var + eps).sqrt().to(like)

    def list_blocks(self) -> list[nn.Module]:
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]


class Flux2Model(Flux2Backbone):
    """Adapter of ``Flux2Pipeline`` without images to edit."""

    pipeline_class = Flux2Pipeline
    shares_tokens = True
    published: ClassVar[Published] = {"black-forest-labs/FLUX.2-dev": FLUX2_DEV}
    guided = FAMILY.guided

    @classmethod
    def load(
        cls, folder: Path, config: ModelConfig, device: torch.device, weights_later: bool = False
    ) -> Self:
        """As ``ebbflow.models.pipeline.PipelineModel.load``."""
        model = super().load(folder, config, device, weights_later)
        with report_unreadable_parts(folder, config.family):
            model.pipeline.register_modules(tokenizer=TextProcessor.from_folder(folder))
        return model

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        # diffusers cannot read it without torchvision, nor accept ours for it: ``load`` puts ours
        # into the finished pipeline.
        return {"tokenizer": None}

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``; the processor as it was published."""
        super().save(folder)
        # The folder that the pipeline was loaded from.
        copy_published_part(Path(self.pipeline.config._name_or_path), folder, "tokenizer")


def token_positions(latents: Tensor, image: int = 0) -> Tensor:
    """(image, row, column, 0) of every token of latents [N, C, H, W], float32 [H/2 W/2, 4]."""
    # Text counts in the fourth axis and images in the first three. Not in the precision of the
    # latents: bfloat16 has no odd number above 256, and text has 512 places.
    height, width = (torch.arange(side // 2) for side in latents.shape[-2:])
    places = torch.cartesian_prod(torch.tensor([image]), height, width, torch.arange(1))
    return copy_ahead(places.float(), latents.device)
