"""A tiny FLUX.1 Kontext dev."""

from __future__ import annotations

from diffusers import FluxKontextPipeline

from benchmarks.tiny_models.flux import flux


def flux_kontext() -> FluxKontextPipeline:
    """The layout of FLUX.1 Kontext dev, whose parts are those of FLUX.1 dev."""
    return FluxKontextPipeline(**flux().components)
