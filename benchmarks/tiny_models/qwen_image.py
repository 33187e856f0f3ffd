"""A tiny Qwen-Image."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from benchmarks.tiny_models.tokenizers import build_qwen_tokenizer


def qwen_image() -> QwenImagePipeline:
    """The layout of Qwen-Image."""
    tokenizer = build_qwen_tokenizer()
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
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    # z_dim stays 16, as latents_mean and latents_std of the defaults have 16 values
    vae = AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1)
    return QwenImagePipeline(scheduler, vae, _build_qwen_vl(tokenizer), tokenizer, transformer)


def _build_qwen_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        # sections of time, height and width: half of the head's 16 dimensions in all
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
    # the ids of the tokenizer: the published ones are beyond its vocabulary
    tokens = {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in tokens.items()
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    )
