"""A tiny Qwen-Image and a tiny Qwen-Image-Edit."""

from __future__ import annotations

import json
from pathlib import Path

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from ebbflow.models.folder import INDEX
from ebbflow.models.tiny.tokenizers import qwen_tokenizer


def qwen_image() -> QwenImagePipeline:
    """The layout of Qwen-Image."""
    tokenizer = qwen_tokenizer()
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
    transformer = QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
    )
    vae = AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1)
    return QwenImagePipeline(scheduler, vae, _qwen_vl(tokenizer), tokenizer, transformer)


def qwen_image_edit() -> QwenImagePipeline:
    """A Qwen-Image that is saved as a Qwen-Image-Edit, which has the same parts and a processor."""
    return _SavedForEditing(**qwen_image().components)


class _SavedForEditing(QwenImagePipeline):  # type: ignore[misc, unused-ignore]  # mypy cannot follow diffusers' lazy modules
    """Writes the processor's files by hand: its class needs torchvision, for videos that nobody shows it."""

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        index = json.loads((folder / INDEX).read_text())
        index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
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


def _qwen_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
