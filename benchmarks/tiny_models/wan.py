"""A tiny Wan 2.2, and what it shares with a tiny Wan 2.1."""

from __future__ import annotations

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from benchmarks.tiny_models.parts import build_umt5
from benchmarks.tiny_models.tokenizers import build_t5_tokenizer


def build_wan(vae: AutoencoderKLWan, flow_shift: float, expand_timesteps: bool) -> WanPipeline:
    """Build a pipeline around a VAE, with as many latent channels as the VAE has."""
    tokenizer = build_t5_tokenizer()
    transformer = WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=2,
        # as of 128, a third is twice a sixth: vLLM-Omni splits rotary positions into such thirds
        attention_head_dim=12,
        in_channels=vae.config.z_dim,
        out_channels=vae.config.z_dim,
        text_dim=32,
        ffn_dim=64,
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )
    # expand_timesteps: a timestep for each patch instead of one for the video
    return WanPipeline(
        tokenizer,
        build_umt5(tokenizer, width=32),
        vae,
        scheduler,
        transformer,
        expand_timesteps=expand_timesteps,
    )


def wan() -> WanPipeline:
    """The layout of Wan 2.2 TI2V 5B."""
    # 16 x 16 pixels to a latent: patches of 2 x 2 x 3 = 12 channels, and then 8 as in Wan 2.1
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    return build_wan(vae, flow_shift=5.0, expand_timesteps=True)
