"""A tiny Stable Diffusion 3.5."""

from __future__ import annotations

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection

from benchmarks.tiny_models.parts import build_clip, build_image_vae, build_t5
from benchmarks.tiny_models.tokenizers import build_clip_tokenizer, build_t5_tokenizer


def sd3() -> StableDiffusion3Pipeline:
    """The layout of Stable Diffusion 3.5 medium."""
    # The second CLIP pads with "!", id 0, and not with the end token.
    tokenizers = [build_clip_tokenizer(), build_clip_tokenizer(pad="!"), build_t5_tokenizer()]
    encoders = [
        build_clip(CLIPTextModelWithProjection, tokenizers[0], width=16, activation="quick_gelu"),
        build_clip(CLIPTextModelWithProjection, tokenizers[1], width=24, activation="gelu"),
        build_t5(tokenizers[2], width=48),
    ]
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=48,
        caption_projection_dim=32,
        pooled_projection_dim=16 + 24,  # both CLIPs' pooled embeddings, side by side
        pos_embed_max_size=48,
        dual_attention_layers=(0,),  # 3.5 medium has such layers, 3.0 and 3.5 large none
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        build_image_vae(shift=0.0609, scale=1.5305),
        *(part for pair in zip(encoders, tokenizers, strict=True) for part in pair),
    )
