"""Editing an image by text with the later Qwen-Image-Edit models, 2509 and 2511."""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as pipelines
from PIL import Image

from ebbflow.models.base import Conditioning, Tokens
from ebbflow.models.editing import name_images
from ebbflow.models.families.qwen_image import PARTS, QwenImageModel, mask_or_none
from ebbflow.models.families.qwen_image_edit import PIXELS_PER_TOKEN, QwenImageEditModel
from ebbflow.recipe.families import Family

FAMILY = Family(
    adapter="QwenImageEditPlusModel",
    pipeline="QwenImageEditPlusPipeline",
    size_multiple=16,
    edits_images=True,
    max_images=None,
    feature_caches=("first_block", "taylor_seer", "mag"),
)


class QwenImageEditPlusModel(QwenImageEditModel):
    """Adapter of ``QwenImageEditPlusPipeline`` with one image or several: the text encoder sees
    them smaller than the network.
    """

    pipeline_class = QwenImageEditPlusPipeline
    min_images = FAMILY.min_images
    max_images = FAMILY.max_images
    published = {"Qwen/Qwen-Image-Edit-2509": PARTS, "Qwen/Qwen-Image-Edit-2511": PARTS}

    def count_tokens(self) -> Tokens:
        # Of one image; how many a prompt has, its row says. Not super(): that of the first model
        # counts the image as its text encoder sees it.
        plain = QwenImageModel.count_tokens(self)
        edited = pipelines.VAE_IMAGE_SIZE // self.pipeline.vae_scale_factor**2 // 4
        return Tokens(
            image=plain.image,
            text=plain.text + pipelines.CONDITION_IMAGE_SIZE // PIXELS_PER_TOKEN,
            edited=edited,
        )

    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        return _size_with_area(pipelines.VAE_IMAGE_SIZE, picture)

    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        # The text encoder sees 384 x 384 pixels or as many, the VAE a megapixel of the original.
        small = []
        for picture in pictures:
            width, height = _size_with_area(pipelines.CONDITION_IMAGE_SIZE, picture)
            small.append(self.pipeline.image_processor.resize(picture, height, width))
        embeds, mask = self.pipeline.encode_prompt(text, image=small, device=self.device)
        latents = [
            self._encode_picture(picture, *self._scaled_size(picture)) for picture in pictures
        ]
        return Conditioning(mask_or_none(embeds, mask) | name_images(latents))


def _size_with_area(pixels: int, picture: Image.Image) -> tuple[int, int]:
    """Width and height of about so many pixels, multiples of 32, in the proportions of the
    picture."""
    width, height = pipelines.calculate_dimensions(pixels, picture.width / picture.height)
    return width, height
