"""What the families that edit images share: pictures of the prompt table, scaled to one size, a
prompt encoded at a time.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from PIL import Image
from torch import Tensor

from ebbflow.data.images import split_condition_images
from ebbflow.data.prompts import Prompt, format_count
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.pipeline import PipelineModel
from ebbflow.recipe.families import Family


class EditsImages(PipelineModel):
    """A family whose prompts come with an image, or several; its conditioning has the latents of
    each, "image", "image_2", "image_3" ..., [N, C, H, W].

    Attributes:
        min_images: the fewest images of a prompt, as the family's record says.
        max_images: the most; None: any number.
    """

    min_images: ClassVar[int] = 1
    max_images: ClassVar[int | None] = 1

    @abstractmethod
    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        """Width and height that the pipeline scales an image to, for the network."""

    @abstractmethod
    def _encode_edit_prompt(self, text: str, pictures: Sequence[Image.Image]) -> Conditioning:
        """One prompt with its images."""

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        """As ``ebbflow.models.base.Model.encode_prompts``.

        Raises:
            ModelError: a prompt has no image, or more or fewer than the family takes; or the images
                of two prompts would be scaled to different sizes.
        """
        # Latents of different sizes cannot be rows of one tensor [N, C, H, W], and cannot be
        # padded: the network would take the padding for a part of the image.
        sizes = {
            tuple(self._scaled_size(picture) for picture in self._open_pictures(prompt)): prompt
            for prompt in prompts
        }
        if len(sizes) > 1:
            listed = ", ".join(
                f"{' and '.join(f'{width} x {height}' for width, height in images)} of prompt"
                f" {prompt.prompt_id}"
                for images, prompt in sizes.items()
            )
            raise ModelError(
                f"the images to edit would be scaled to different sizes ({listed}); crop them to"
                " one shape, and give each prompt as many"
            )
        return super().encode_prompts(prompts)

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # One at a time: a text encoder that sees images gets those of one prompt per call.
        rows = [
            self._encode_edit_prompt(text, self._open_pictures(prompt))
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        return dict(Conditioning.concatenate(rows).tensors)

    def _open_pictures(self, prompt: Prompt) -> list[Image.Image]:
        if prompt.image is None:
            raise ModelError(
                f"prompt {prompt.prompt_id} ({prompt.prompt!r}) has no image to edit; add a column"
                " 'image' to the prompts"
            )
        files = split_condition_images(prompt.image)
        record = Family("", min_images=self.min_images, max_images=self.max_images)
        if not record.takes_images(len(files)):
            raise ModelError(
                f"prompt {prompt.prompt_id} ({prompt.prompt!r}) has"
                f" {format_count(len(files), 'image')}, and {self.config.family} takes"
                f" {record.describe_images()}; change the column 'image', or the family"
                " (docs/models.md)"
            )
        return [Image.open(io.BytesIO(file)).convert("RGB") for file in files]


def name_images(latents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The latents of each image of a prompt, by their names in the conditioning."""
    names = ["image", *(f"image_{number}" for number in range(2, len(latents) + 1))]
    return dict(zip(names, latents, strict=True))


def list_images(conditioning: Conditioning) -> list[Tensor]:
    """The latents of the images, in the order of ``name_images``."""
    # By number: a file of embeddings has its tensors in another order.
    images = [conditioning["image"]]
    while f"image_{len(images) + 1}" in conditioning.tensors:
        images.append(conditioning[f"image_{len(images) + 1}"])
    return images
