"""A tiny Qwen-Image-Edit-2511."""

from __future__ import annotations

from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from benchmarks.tiny_models.qwen_image import qwen_image
from benchmarks.tiny_models.qwen_image_edit import SavedForEditing


def qwen_image_edit_plus() -> QwenImagePipeline:
    """The layout of Qwen-Image-Edit-2511, whose network sees the image to edit as free of noise;
    that of 2509 lacks the key.
    """
    plain = qwen_image()
    network = QwenImageTransformer2DModel.from_config(
        {**plain.transformer.config, "zero_cond_t": True}
    )
    return _SavedForEditingPlus(**plain.components | {"transformer": network})


class _SavedForEditingPlus(SavedForEditing):
    saved_as = "QwenImageEditPlusPipeline"
