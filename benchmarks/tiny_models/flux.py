"""A tiny FLUX.1 dev."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from benchmarks.tiny_models.parts import build_clip, build_image_vae, build_t5
from benchmarks.tiny_models.tokenizers import build_clip_tokenizer, build_t5_tokenizer


def flux() -> FluxPipeline:
    """The layout of FLUX.1 dev."""
    tokenizer = build_clip_tokenizer()
    tokenizer_2 = build_t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,  # 4 latent channels x 2 x 2 of a patch
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=48,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),  # add up to attention_head_dim: text, rows, columns
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(
        scheduler,
        build_image_vae(shift=0.1159, scale=0.3611),
        build_clip(CLIPTextModel, tokenizer, width=16, activation="quick_gelu"),
        tokenizer,
        build_t5(tokenizer_2, width=48),
        tokenizer_2,
        transformer,
    )
