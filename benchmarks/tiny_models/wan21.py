"""A tiny Wan 2.1."""

from __future__ import annotations

from diffusers import AutoencoderKLWan, WanPipeline

from benchmarks.tiny_models.wan import build_wan


def wan21() -> WanPipeline:
    """The layout of Wan 2.1 T2V 1.3B."""
    vae = AutoencoderKLWan(base_dim=4, num_res_blocks=1)
    return build_wan(vae, flow_shift=3.0, expand_timesteps=False)
