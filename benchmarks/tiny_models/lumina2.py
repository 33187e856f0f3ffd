"""A tiny Lumina-Image 2.0."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

from benchmarks.tiny_models.parts import build_gemma2, build_image_vae
from benchmarks.tiny_models.tokenizers import build_gemma_tokenizer


def lumina2() -> Lumina2Pipeline:
    """The layout of Lumina-Image 2.0."""
    tokenizer = build_gemma_tokenizer()
    transformer = Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        cap_feat_dim=32,
    )
    vae = build_image_vae(shift=0.1159, scale=0.3611)
    text_encoder = build_gemma2(tokenizer, width=32)
    return Lumina2Pipeline(
        transformer, FlowMatchEulerDiscreteScheduler(shift=6.0), vae, text_encoder, tokenizer
    )
