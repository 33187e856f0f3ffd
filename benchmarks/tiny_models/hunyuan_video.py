"""A tiny HunyuanVideo."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import CLIPTextModel, LlamaConfig, LlamaModel

from benchmarks.tiny_models.parts import build_clip
from benchmarks.tiny_models.tokenizers import build_clip_tokenizer, build_llama_tokenizer


def hunyuan_video() -> HunyuanVideoPipeline:
    """The layout of HunyuanVideo; four latent channels instead of 16."""
    tokenizer = build_llama_tokenizer()
    tokenizer_2 = build_clip_tokenizer()
    text_encoder = LlamaModel(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,  # the pipeline skips the last two
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        text_embed_dim=32,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    # 8 x 8 pixels and 4 frames to a latent, as published
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        mid_block_add_attention=True,
    )
    text_encoder_2 = build_clip(CLIPTextModel, tokenizer_2, width=16, activation="quick_gelu")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    return HunyuanVideoPipeline(
        text_encoder, tokenizer, transformer, vae, scheduler, text_encoder_2, tokenizer_2
    )
