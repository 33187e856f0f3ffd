"""A tiny LTX-2."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from benchmarks.tiny_models.parts import build_gemma3
from benchmarks.tiny_models.tokenizers import build_gemma_tokenizer

CHANNELS = 4
LAYERS = 2
WIDTH = 32
SOUND = 8
"""Channels of the sound's latents: two for each of four bands of frequencies."""


def ltx2() -> LTX2Pipeline:
    """The layout of LTX-2; four latent channels instead of 128."""
    tokenizer = build_gemma_tokenizer()
    # Two streams, of the video and of its sound, that attend to each other in every block.
    transformer = LTX2VideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=WIDTH,
        audio_in_channels=SOUND,
        audio_out_channels=SOUND,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        caption_channels=WIDTH,
        rope_type="split",
    )
    # The order in which parts with weights are created is part of the bytes that a seed gives.
    connectors = _build_connectors()
    vae = _build_video_vae()
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=SOUND, num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=16
    )
    # a spectrogram of 2 channels and 16 mel bins to a waveform
    vocoder = LTX2Vocoder(
        in_channels=2 * 16,
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    text_encoder = build_gemma3(tokenizer, WIDTH, LAYERS)
    # As those of the video, and last: the numbers above stay the same.
    audio_vae.latents_mean.copy_(torch.randn(SOUND))
    audio_vae.latents_std.copy_(torch.rand(SOUND) + 0.5)
    return LTX2Pipeline(
        scheduler, vae, audio_vae, text_encoder, tokenizer, connectors, transformer, vocoder
    )


def _build_connectors() -> LTX2TextConnectors:
    # They turn the states of all layers of the text encoder, embeddings included, into the captions
    # of both streams.
    connector = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_learnable_registers": 8,
    }
    return LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=LAYERS + 1,
        rope_type="split",
        **{
            f"{kind}_connector_{key}": value
            for kind in ("video", "audio")
            for key, value in connector.items()
        },
    )


def _build_video_vae() -> AutoencoderKLLTX2Video:
    # 32 x 32 pixels and 8 frames to a latent, as published
    vae = AutoencoderKLLTX2Video(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 16, 16),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    # Buffers, 0 and 1 as constructed: an adapter that forgets to apply them would not be noticed.
    vae.latents_mean.copy_(torch.randn(CHANNELS))
    vae.latents_std.copy_(torch.rand(CHANNELS) + 0.5)
    return vae
