"""A tiny Qwen-Image-2.1."""

from __future__ import annotations

import json
from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)

from benchmarks.tiny_models.parts import build_qwen3_vl
from benchmarks.tiny_models.tokenizers import build_qwen3_tokenizer
from ebbflow.models.families.qwen_image_21 import TextOnlyProcessor
from ebbflow.recipe.base_folder import INDEX

WIDTH = 32


def qwen_image_21() -> QwenImage21Pipeline:
    """The layout of Qwen-Image-2.1; the scheduler is that of Qwen-Image, as its own is unknown
    here.
    """
    tokenizer = build_qwen3_tokenizer()
    # the pipeline counts the tokens of its system prompt, whose content is a list
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "message.content[0].text"
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    transformer = QwenImage21Transformer2DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    # z_dim stays 64, as latents_mean and latents_std of the defaults have 64 values
    vae = AutoencoderKLQwenImage21(base_dim=4, decoder_base_dim=4, num_res_blocks=1)
    return _SavedWithProcessor(
        scheduler,
        vae,
        build_qwen3_vl(tokenizer, WIDTH, layers=2),
        TextOnlyProcessor(tokenizer),
        transformer,
    )


# mypy cannot follow diffusers' lazy modules.
class _SavedWithProcessor(QwenImage21Pipeline):  # type: ignore[misc, unused-ignore]
    """Names the published processor, whose class needs torchvision for images that nobody shows
    it.
    """

    def save_pretrained(self, folder: Path) -> None:
        processor = self.processor
        super().save_pretrained(folder)
        index = json.loads((folder / INDEX).read_text())
        index |= {
            "_class_name": "QwenImage21Pipeline",
            "processor": ["transformers", "Qwen3VLProcessor"],
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        processor.tokenizer.save_pretrained(folder / "processor")
