"""A tiny LTX-Video."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)

from benchmarks.tiny_models.parts import build_t5
from benchmarks.tiny_models.tokenizers import build_t5_tokenizer

CHANNELS = 4


def ltx_video() -> LTXPipeline:
    """The layout of the first LTX-Video; four latent channels instead of 128."""
    tokenizer = build_t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 16, 16),
        decoder_block_out_channels=(8, 8, 16, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    # buffers, 0 and 1 as constructed: an adapter that forgets to apply them would not be noticed
    vae.latents_mean.copy_(torch.randn(CHANNELS))
    vae.latents_std.copy_(torch.rand(CHANNELS) + 0.5)
    # the shift grows with the number of latents, between the two lengths
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return LTXPipeline(scheduler, vae, build_t5(tokenizer, width=32), tokenizer, transformer)
