"""A tiny SANA."""

from __future__ import annotations

from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)

from benchmarks.tiny_models.parts import build_gemma2
from benchmarks.tiny_models.tokenizers import build_gemma_tokenizer

# Six stages with five downsamplings: 32 pixels to a latent.
STAGES = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
CHANNELS = (8, 8, 8, 8, 16, 16)


def sana() -> SanaPipeline:
    """The layout of SANA-1.5; four latent channels instead of 32."""
    tokenizer = build_gemma_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        qk_norm="rms_norm_across_heads",
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types=STAGES,
        decoder_block_types=STAGES,
        encoder_block_out_channels=CHANNELS,
        decoder_block_out_channels=CHANNELS,
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )
    scheduler = DPMSolverMultistepScheduler(
        flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
    )
    return SanaPipeline(tokenizer, build_gemma2(tokenizer, width=32), vae, transformer, scheduler)
