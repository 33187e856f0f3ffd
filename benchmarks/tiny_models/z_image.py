"""A tiny Z-Image."""

from __future__ import annotations

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from benchmarks.tiny_models.parts import build_image_vae, build_qwen3
from benchmarks.tiny_models.tokenizers import build_qwen3_tokenizer


def z_image() -> ZImagePipeline:
    """The layout of Z-Image."""
    tokenizer = build_qwen3_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],  # add up to dim / n_heads
        axes_lens=[1536, 512, 512],
    )
    text_encoder = build_qwen3(Qwen3Model, tokenizer, width=32, layers=2)
    vae = build_image_vae(shift=0.1159, scale=0.3611)
    return ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=6.0), vae, text_encoder, tokenizer, transformer
    )
