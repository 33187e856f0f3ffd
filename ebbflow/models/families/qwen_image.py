"""The Qwen-Image family (2508.02324): text to image, and editing an image by text."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2VLProcessor

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.pipeline import JOINT_ATTENTION, PackedPipelineModel, channel_statistics, pack
from ebbflow.recipe.model import ModelConfig

PIXELS_PER_TOKEN = 28 * 28
"""Qwen2.5-VL (2502.13923) makes a token of a square of 28 pixels."""


class PictureProcessor(Qwen2VLProcessor):  # type: ignore[misc, unused-ignore]  # mypy cannot follow transformers' lazy modules
    """The text encoder's processor without its part for videos, which none is shown and which would need torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class QwenImageModel(PackedPipelineModel):
    """Adapter of ``QwenImagePipeline``: true classifier-free guidance whose result keeps the norm of the prompt's prediction."""

    pipeline_class = QwenImagePipeline
    lora_targets = [
        *JOINT_ATTENTION,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    ]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    default_size = (1024, 1024)

    @classmethod
    def _check(cls, pipeline: Any, config: ModelConfig) -> None:
        limit = pipeline.tokenizer_max_length
        if config.max_tokens is not None and config.max_tokens > limit:
            raise ModelError(f"model.max_tokens = {config.max_tokens}: the pipeline reads {limit} at most; leave it out")

    def _encode(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        embeds, mask = self.pipeline.encode_prompt(texts, device=self.device, max_sequence_length=self.max_tokens)
        return _masked(embeds, mask)

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        _, height, width = self.latent_shape
        return self._network(pack(latents), sigma, conditioning, [(1, height // 2, width // 2)])

    def _network(self, tokens: Tensor, sigma: Tensor, conditioning: Conditioning, shapes: list[tuple[int, int, int]]) -> Tensor:
        # All padding, and the mask even where it masks nothing: cut to a micro-batch's longest prompt, a row's last bits
        # would depend on the rows beside it, which in bfloat16 moved the first ratio by 5e-4 (python -m benchmarks.precision).
        velocity: Tensor = self.transformer(
            hidden_states=tokens,
            timestep=sigma,
            encoder_hidden_states=conditioning["embeds"],
            encoder_hidden_states_mask=conditioning["mask"],
            img_shapes=[shapes] * len(tokens),
            return_dict=False,
        )[0]
        return velocity

    def _guide(self, prediction: Tensor, negative: Tensor, guidance: float) -> Tensor:
        guided = super()._guide(prediction, negative, guidance)
        rescaled: Tensor = guided * (prediction.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        return rescaled

    def _to_vae(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return (latents * std + mean)[:, :, None]  # the VAE is one of videos

    def _from_vae(self, latents: Tensor) -> Tensor:
        mean, std = channel_statistics(self.pipeline.vae, latents)
        return ((latents - mean) / std)[:, :, 0]

    def _decode(self, latents: Tensor) -> Tensor:
        return super()._decode(latents)[:, 0]

    def _encode_pixels(self, images: Tensor) -> Tensor:
        return super()._encode_pixels(images[:, None])

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer.transformer_blocks)


class QwenImageEditModel(QwenImageModel):
    """Adapter of ``QwenImageEditPipeline``: the prompt table's ``image`` is seen by the text encoder and by the network."""

    pipeline_class = QwenImageEditPipeline
    text_parts = ("text_encoder", "vae")
    edited_pixels = 1024 * 1024
    """The pipeline scales the image to edit to about this many pixels, whatever the size that it draws."""

    @classmethod
    def _check(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.max_tokens is not None:
            raise ModelError(f"model.max_tokens = {config.max_tokens}: editing reads prompts whole; leave it out")

    def tokens(self) -> Tokens:
        plain, edited = super().tokens(), self.edited_pixels // self.pipeline.vae_scale_factor**2 // 4
        return Tokens(image=plain.image, text=plain.text + self.edited_pixels // PIXELS_PER_TOKEN, edited=edited)

    @staticmethod
    def _own_parts(folder: Path) -> dict[str, Any]:
        return {"processor": PictureProcessor.from_pretrained(folder / "processor", local_files_only=True)}

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """As ``ebbflow.models.base.Model.encode``.

        Raises:
            ModelError: a prompt has no image, or two images would be scaled to different sizes.
        """
        sizes = {self._scaled(_picture(prompt)): prompt.prompt_id for prompt in prompts}
        if len(sizes) > 1:
            listed = ", ".join(f"{width} x {height} of prompt {prompt_id}" for (width, height), prompt_id in sizes.items())
            raise ModelError(f"the images to edit would be scaled to different sizes ({listed}); crop them to one shape")
        return super().encode(prompts)

    def _encode(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        rows = [self._encode_edit(text, _picture(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
        return dict(Conditioning.cat(rows).tensors)

    def _encode_edit(self, text: str, picture: Image.Image) -> Conditioning:
        """One prompt with its image: "image" are the latents of the VAE, [1, C, H, W]."""
        width, height = self._scaled(picture)
        scaled = self.pipeline.image_processor.resize(picture, height, width)
        embeds, mask = self.pipeline.encode_prompt(text, image=scaled, device=self.device)
        pixels = self.pipeline.image_processor.preprocess(scaled, height, width).to(self.device)
        latents = self._from_vae(self.pipeline.vae.encode(pixels[:, :, None]).latent_dist.mode())
        return Conditioning(_masked(embeds, mask) | {"image": latents})

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``; the processor as it was published: ours is a class that only Ebbflow has."""
        super().save(folder)
        published = Path(self.pipeline.config._name_or_path)
        shutil.copytree(published / "processor", folder / "processor", dirs_exist_ok=True)
        shutil.copyfile(published / "model_index.json", folder / "model_index.json")

    def _scaled(self, picture: Image.Image) -> tuple[int, int]:
        """Width and height that the pipeline scales an image to."""
        width, height, _ = calculate_dimensions(self.edited_pixels, picture.width / picture.height)
        return width, height

    def _predict(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        tokens, image = pack(latents), conditioning["image"]
        shapes = [(1, side.shape[-2] // 2, side.shape[-1] // 2) for side in (latents, image)]
        prediction = self._network(torch.cat([tokens, pack(image).to(tokens)], 1), sigma, conditioning, shapes)
        return prediction[:, : tokens.shape[1]]


def _picture(prompt: Prompt) -> Image.Image:
    if prompt.image is None:
        raise ModelError(
            f"prompt {prompt.prompt_id} ({prompt.prompt!r}) has no image to edit; add a column 'image' to the prompts"
        )
    return Image.open(io.BytesIO(prompt.image)).convert("RGB")


def _masked(embeds: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """The pipeline leaves a mask out that masks nothing; rows of other batches may be longer."""
    mask = embeds.new_ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    return {"embeds": embeds, "mask": mask}
