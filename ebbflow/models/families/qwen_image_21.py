"""Qwen-Image-2.1, text to image: one stream of text and image, and images with an alpha channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers import QwenImage21Pipeline
from torch import Tensor, nn
from transformers import AutoTokenizer, ProcessorMixin, Qwen2Tokenizer, Qwen3VLProcessor

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.device_forwards import computes_with, replace_forward, run_text_to_image
from ebbflow.models.equal_lengths import run_by_length
from ebbflow.models.folder import copy_published_part
from ebbflow.models.pipeline import PipelineModel, channel_statistics, dynamic_shift_arguments
from ebbflow.models.published import Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="QwenImage21Model",
    pipeline="QwenImage21Pipeline",
    size_multiple=32,
    caveat="its pipeline writes images with an alpha channel; training, rewards and evaluation see"
    " them on white",
)
QWEN3_VL_8B: dict[str, Any] = {
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "vision_config": {"out_hidden_size": 4096},
}
PUBLISHED: Published = {
    "Qwen/Qwen-Image-2.1": {
        "transformer": Part("diffusers", "QwenImage21Transformer2DModel", {}),
        "text_encoder": Part("transformers", "Qwen3VLForConditionalGeneration", QWEN3_VL_8B),
        "vae": Part("diffusers", "AutoencoderKLQwenImage21", {}),
    }
}
SLOT = 4
"""Tokens of the image for each place that the sequence of the text encoder has for it."""


# mypy cannot follow transformers' lazy modules.
class TextOnlyProcessor(Qwen3VLProcessor):  # type: ignore[misc, unused-ignore]
    """The text encoder's processor without its parts for images and videos, which none is shown and
    which would need torchvision.
    """

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        # Not that of Qwen3VLProcessor, which has three parts.
        ProcessorMixin.__init__(self, tokenizer, chat_template=tokenizer.chat_template)

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        # Of a chat template it is one text, and the pipeline reads the tokens of the first one.
        return super().__call__(text=[text] if isinstance(text, str) else text, **options)

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["tokenizer"]

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """That of a pipeline's folder."""
        return cls(AutoTokenizer.from_pretrained(folder / "processor", local_files_only=True))


class NoProcessor:
    """What the pipeline asks its processor when it is built, for estimates, which have none."""

    @property
    def tokenizer(self) -> NoProcessor:
        return self

    def apply_chat_template(self, messages: Any, **options: Any) -> list[list[int]]:
        return [[]]

    def encode(self, text: str) -> list[int]:
        return [0]


class QwenImage21Model(PipelineModel):
    """Adapter of ``QwenImage21Pipeline`` without images to edit.

    Guidance is distilled into the published model; its pipeline has none by default. The image's
    positions begin after the prompt, which therefore is never padded.
    """

    pipeline_class = QwenImage21Pipeline
    published: ClassVar[Published] = PUBLISHED
    lora_targets = [
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"img_mlp.{layer}" for layer in ("proj", "gate_layer", "out")),
    ]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_size = (1024, 1024)

    def __init__(self, pipeline: Any, config: ModelConfig, device: torch.device) -> None:
        super().__init__(pipeline, config, device)
        replace_forward(self.transformer, run_text_to_image)

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.max_tokens is not None:
            raise ModelError(
                f"model.max_tokens = {config.max_tokens}: {config.family} reads prompts whole;"
                " leave it out"
            )
        if pipeline.config.sample_sigmas is not None:
            raise ModelError(
                f"{config.path} is distilled to a fixed schedule of"
                f" {len(pipeline.config.sample_sigmas)} steps; take Qwen/Qwen-Image-2.1"
            )

    @classmethod
    def assemble_pipeline(cls, parts: Mapping[str, Any]) -> Any:
        """As ``ebbflow.models.pipeline_loading.ReadsPipeline.assemble_pipeline``."""
        return super().assemble_pipeline({"processor": NoProcessor()} | dict(parts))

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        return {"processor": TextOnlyProcessor.from_folder(folder)}

    def _compute_latent_shape(self) -> tuple[int, ...]:
        # A latent is a token. The pipeline cuts sizes to an even number of them.
        scale = self.pipeline.vae_scale_factor
        self._require_multiple(2 * scale)
        return (self.transformer.config.in_channels, self.height // scale, self.width // scale)

    @property
    def vae_latent_shape(self) -> tuple[int, ...]:
        """A sample as the VAE has it: as the only frame of a video."""
        channels, rows, columns = self.latent_shape
        return channels, 1, rows, columns

    def count_tokens(self) -> Tokens:
        return Tokens(image=self.latent_shape[1] * self.latent_shape[2], text=self.max_tokens)

    def token_widths(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.num_attention_heads * config.attention_head_dim, config.context_in_dim

    def _schedule_arguments(self, tokens: int, steps: int) -> dict[str, float]:
        # As many tokens as latents.
        return dynamic_shift_arguments(
            self.pipeline.scheduler, self.latent_shape[1] * self.latent_shape[2]
        )

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # One at a time: then the text encoder pads nothing.
        rows = []
        for text in texts:
            embeds, _, _ = self.pipeline.encode_prompt(text, device=self.device)
            mask = torch.ones_like(embeds[:, :, 0], dtype=torch.bool)
            rows.append(Conditioning({"embeds": embeds, "mask": mask}))
        return dict(Conditioning.concatenate(rows).tensors)

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return run_by_length(
            self.transformer, latents, sigma, conditioning, self._run_equal_lengths
        )

    def _run_equal_lengths(self, latents: Tensor, sigma: Tensor, embeds: Tensor) -> Tensor:
        count, _, height, width = latents.shape
        is_image = None
        if not computes_with(self.transformer, run_text_to_image):
            # diffusers' own forward pass, of a network that was put in place of the loaded one,
            # is told where the text has places for the image: at its end, [n, L + H W / 4].
            is_image = embeds.new_zeros(
                count, embeds.shape[1] + height * width // SLOT, dtype=torch.bool
            )
            is_image[:, embeds.shape[1] :] = True
        prediction: Tensor = self.transformer(
            hidden_states=latents.flatten(2).mT,
            timestep=sigma,
            encoder_hidden_states=embeds,
            img_shapes=[[(1, height, width)]] * count,
            img_mask=is_image,
            return_dict=False,
        )[0]
        # [n, L + H W, C]: what it predicts of the text is no velocity of anything.
        return prediction[:, -height * width :].mT.reshape(latents.shape)

    # The VAE is one of videos with four channels, red, green, blue and alpha; an image is the only
    # frame.

    def _unscale_latents(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return (latents * std + mean)[:, :, None]

    def _scale_latents(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return ((latents - mean) / std)[:, :, 0]

    def _decode_pixels(self, latents: Tensor) -> Tensor:
        # On white, as the model's own text encoder sees images.
        colors, alpha = super()._decode_pixels(latents)[:, 0].split([3, 1], dim=-1)
        on_white: Tensor = colors * alpha + (1 - alpha)
        return on_white

    def _encode_with_vae(self, pixels: Tensor) -> Tensor:
        opaque = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
        return super()._encode_with_vae(opaque[:, :, None])

    def list_blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``; the processor as it was published."""
        super().save(folder)
        # The folder that the pipeline was loaded from.
        copy_published_part(Path(self.pipeline.config._name_or_path), folder, "processor")
