"""A tiny FLUX.2 [klein] base."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

from benchmarks.tiny_models.parts import build_qwen3
from benchmarks.tiny_models.tokenizers import build_qwen3_tokenizer

WIDTH = 16
LAYERS = 27
"""The pipeline reads the states behind the layers 9, 18 and 27."""


def flux2_klein() -> Flux2KleinPipeline:
    """The layout of FLUX.2 [klein] base."""
    tokenizer = build_qwen3_tokenizer()
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * WIDTH,  # the states behind three layers, side by side
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16), norm_num_groups=4, latent_channels=4, sample_size=128
    )
    # Latents are normalised by these buffers, 0 and 1 as constructed. 16 = 4 channels x 2 x 2 of a
    # patch, which is also in_channels above.
    vae.bn.running_mean.copy_(torch.randn(16))
    vae.bn.running_var.copy_(torch.rand(16) + 0.5)
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    text_encoder = build_qwen3(Qwen3ForCausalLM, tokenizer, width=WIDTH, layers=LAYERS)
    return Flux2KleinPipeline(scheduler, vae, text_encoder, tokenizer, transformer)
