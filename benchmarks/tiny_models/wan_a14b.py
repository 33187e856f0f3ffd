"""A tiny Wan2.2-A14B."""

from __future__ import annotations

from diffusers import WanPipeline, WanTransformer3DModel

from benchmarks.tiny_models.wan21 import wan21


def wan_a14b() -> WanPipeline:
    """The layout of Wan2.2 T2V A14B: Wan2.1 with a second transformer, for the sigmas below
    .875."""
    plain = wan21()
    # built from the configuration, not copied: its weights are drawn like those of the first
    second = WanTransformer3DModel.from_config(plain.transformer.config)
    return WanPipeline(**plain.components | {"transformer_2": second}, boundary_ratio=0.875)
