"""What the families that edit an image share: pictures of the prompt table, scaled to one size, a
prompt encoded at a time.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, ModelError
from ebbflow.models.pipeline import PipelineModel


class EditsImages(PipelineModel):
    """A family whose prompts come with an image; its conditioning has the latents of the image,
    "image" [N, C, H, W].
    """

    @abstractmethod
    def _scaled_size(self, picture: Image.Image) -> tuple[int, int]:
        """Width and height that the pipeline scales an image to, for the network."""

    @abstractmethod
    def _encode_edit_prompt(self, text: str, picture: Image.Image) -> Conditioning:
        """One prompt with its image."""

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        """As ``ebbflow.models.base.Model.encode_prompts``.

        Raises:
            ModelError: a prompt has no image, or two images would be scaled to different sizes.
        """
        # Latents of different sizes cannot be rows of one tensor [N, C, H, W], and cannot be
        # padded: the network would take the padding for a part of the image.
        sizes = {self._scaled_size(_open_picture(prompt)): prompt.prompt_id for prompt in prompts}
        if len(sizes) > 1:
            listed = ", ".join(
                f"{width} x {height} of prompt {prompt_id}"
                for (width, height), prompt_id in sizes.items()
            )
            raise ModelError(
                f"the images to edit would be scaled to different sizes ({listed}); crop them to"
                " one shape"
            )
        return super().encode_prompts(prompts)

    def _encode_inputs(self, texts: list[str], prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        # One at a time: a text encoder that sees the image gets one image per call.
        rows = [
            self._encode_edit_prompt(text, _open_picture(prompt))
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        return dict(Conditioning.concatenate(rows).tensors)


def _open_picture(prompt: Prompt) -> Image.Image:
    if prompt.image is None:
        raise ModelError(
            f"prompt {prompt.prompt_id} ({prompt.prompt!r}) has no image to edit; add a column"
            " 'image' to the prompts"
        )
    return Image.open(io.BytesIO(prompt.image)).convert("RGB")
