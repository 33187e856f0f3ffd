"""A tiny FLUX.2 [dev] to edit with."""

from __future__ import annotations

from diffusers import Flux2Pipeline

from benchmarks.tiny_models.flux2 import flux2


def flux2_edit() -> Flux2Pipeline:
    """The layout of FLUX.2 [dev], which both draws and edits."""
    # a file of its own, as models are found by their files and the family is another one
    return flux2()
