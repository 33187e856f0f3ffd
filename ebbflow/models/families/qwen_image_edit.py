"""Editing an image by text with Qwen-Image (2508.02324): the first Qwen-Image-Edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor

from ebbflow.models.base import Conditioning, ModelError, Tokens
from ebbflow.models.editing import EditsImages, list_images
from ebbflow.models.families.qwen_image import PARTS, QwenImageModel, mask_or_none
from ebbflow.models.folder import copy_published_part
from ebbflow.models.packed import pack_latents
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="QwenImageEditModel",
    pipeline="QwenImageEditPipeline",
    size_multiple=16,
    edits_images=True,
    vllm_omni="ebbflow_vllm_omni.networks:QWEN_IMAGE",
    feature_caches=("first_block", "taylor_seer", "mag"),
)
PIXELS_PER_TOKEN = 28 * 28
"""Qwen2.5-VL (2502.13923) makes a token of a square of 28 pixels."""


# mypy cannot follow transformers' lazy modules.
class PictureProcessor(Qwen2VLProcessor):  # type: ignore[misc, unused-ignore]
    """The text encoder's processor without its part for videos, which none is shown and which would
    need torchvision.
    """

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class QwenImageEditModel(EditsImages, QwenImageModel):
    """Adapter of ``QwenImageEditPipeline``: the prompt table's ``image`` is seen by the text
    encoder and by the network.
    """

    pipeline_class = QwenImageEditPipeline
    published = {"Qwen/Qwen-Image-Edit": PARTS}
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "vae")
    edited_pixels = 1024 * 1024
    """The pipeline scales the image to edit to about this many pixels, whatever the size that it
    draws.
    """

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.max_tokens is not None:
            raise ModelError(
                f"model.max_tokens = {config.max_tokens}: editing reads prompts whole; leave it out"
            )

    def count_tokens(self) -> Tokens:
        # The image counts twice: the text encoder reads it as part of the prompt, and the network
        # sees its latents, a token for 2 x 2 of them.
        plain = super().count_tokens()
        edited = self.edited_pixels // self.pipeline.vae_scale_factor**2 // 4
        return Tokens(
            image=plain.image,
            text=plain.text + self.edited_pixels // PIXELS_PER_TOKEN,
            edited=edited,
        )

    @staticmethod
    def _load_own_parts(folder: Path) -> dict[str, Any]:
        return {
            "processor": PictureProcessor.from_pretrained(
                folder / "processor", local_files_only=True
            )
        }

    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        (picture,) = pictures
        width, height = self._scaled_size(picture)
        scaled = self.pipeline.image_processor.resize(picture, height, width)
        embeds, mask = self.pipeline.encode_prompt(text, image=scaled, device=self.device)
        latents = self._encode_picture(scaled, width, height)
        return Conditioning(mask_or_none(embeds, mask) | {"image": latents})

    def _encode_picture(self, picture: Image.Image, width: int, height: int) -> Tensor:
        """Encode what the network sees of an image, scaled to ``width`` and ``height``.

        The size comes from the original's proportions, as in the pipeline. A picture that was
        scaled to multiples of 32 has slightly other ones, which can lead to another size.

        Returns:
            Latents, [1, C, H, W].
        """
        # [1, 3, 1, H, W] for the VAE, which is one of videos.
        pixels = self.pipeline.image_processor.preprocess(picture, height, width).to(self.device)
        return self._scale_latents(self.pipeline.vae.encode(pixels[:, :, None]).latent_dist.mode())

    def save(self, folder: Path) -> None:
        """As ``ebbflow.models.base.Model.save``; the processor as it was published."""
        super().save(folder)
        # The folder that the pipeline was loaded from.
        copy_published_part(Path(self.pipeline.config._name_or_path), folder, "processor")

    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        width, height, _ = calculate_dimensions(self.edited_pixels, picture.width / picture.height)
        return width, height

    def _run_network(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # [N, S, 4 C]: the tokens of the latents, then those of the images to edit, each with the
        # shape that its positions follow from.
        tokens = pack_latents(latents)
        images = list_images(conditioning)
        shapes = [(1, side.shape[-2] // 2, side.shape[-1] // 2) for side in (latents, *images)]
        edited = [pack_latents(image).to(tokens) for image in images]
        prediction = self._call_transformer(
            torch.cat([tokens, *edited], 1), sigma, conditioning, shapes
        )
        # What it predicts of the images to edit is no velocity of anything.
        return prediction[:, : tokens.shape[1]]
