"""A tiny Qwen-Image-Edit."""

from __future__ import annotations

import json
from pathlib import Path

from diffusers import QwenImagePipeline
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from benchmarks.tiny_models.qwen_image import qwen_image
from ebbflow.recipe.base_folder import INDEX


def qwen_image_edit() -> QwenImagePipeline:
    """A Qwen-Image that is saved as a Qwen-Image-Edit, which has the same parts and a processor."""
    return SavedForEditing(**qwen_image().components)


# mypy cannot follow diffusers' lazy modules.
class SavedForEditing(QwenImagePipeline):  # type: ignore[misc, unused-ignore]
    """Writes the processor's files by hand: its class needs torchvision, for videos that nobody
    shows it.
    """

    saved_as = "QwenImageEditPipeline"

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        index = json.loads((folder / INDEX).read_text())
        index |= {"_class_name": self.saved_as, "processor": ["transformers", "Qwen2VLProcessor"]}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        # a processor is a tokenizer and what prepares images and videos
        self.tokenizer.save_pretrained(folder / "processor")
        _write_processor(folder / "processor")


def _write_processor(folder: Path) -> None:
    pictures = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},  # 4 to 16 tokens a picture
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
        "processor_class": "Qwen2VLProcessor",
    }
    for name, kind in {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
    }.items():
        (folder / name).write_text(json.dumps(pictures | kind, indent=2) + "\n")
