"""Tiny models with random weights, in the folder layouts that the published ones have on the
Hugging Face hub.

``diffusers.DiffusionPipeline.from_pretrained`` loads every part of such a folder without a network.
Classes, configuration keys, schedulers, special tokens, latent shift and scale are those of the
published models; widths, depths and vocabularies are as small as the architectures allow. The
pictures are noise that depends on the prompt: made for tests, benchmarks and smoke runs, which is
why they are no part of the library. From a clone, ``python -m benchmarks.tiny_models sd3 FOLDER``
writes one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ebbflow.recipe.base_folder import ModelError, find_index
from ebbflow.recipe.plugins import import_object
from ebbflow.storage.artifacts import check_replaceable

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import nn

# Before transformers is imported, which reads it then: it warns of parts that nothing here uses.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
SHARED = ("__init__", "__main__", "parts", "tokenizers")
"""Files of this folder that hold no model."""
# found by their files: a new model needs no entry, as a new family in the library needs none
TINY = {
    file.stem: f"{__name__}.{file.stem}:{file.stem}"
    for file in sorted(Path(__file__).parent.glob("*.py"))
    if file.stem not in SHARED
}
"""The builder of each tiny model: a function in a file, both with the name of the model."""


def build_tiny(name: str, folder: Path, seed: int = 0) -> None:
    """Write one of the models of ``TINY`` to a new or empty folder; the same seed gives the same
    bytes.

    Raises:
        ModelError: there is no such model.
        ArtifactError: the folder is not empty.
    """
    if name not in TINY:
        raise ModelError(f"there is no tiny {name!r}; take one of {', '.join(TINY)}")
    check_replaceable(folder, overwrite=False)
    # Not at the top: the command first says what the libraries shall do without (__main__.py).
    import torch
    from torch import nn
    from transformers.utils.logging import disable_progress_bar as silence_transformers

    silence_transformers()
    # imported by name: a model's file imports pipelines of diffusers that take seconds to load
    builder: Callable[[], DiffusionPipeline] = import_object(TINY[name])
    # the caller's random state stays as it was
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        pipeline = builder()
        # Attention alone averages most of the prompt away when weights are small.
        by_attention = "pooled_projection_dim" not in pipeline.transformer.config
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                # a second transformer (Wan A14B) is of the same class as the first
                is_transformer = isinstance(part, type(pipeline.transformer))
                _draw_weights(part, gain=1.4 if is_transformer and by_attention else 1.0)
    pipeline.save_pretrained(folder)
    # transformers 5 has a tokenizer, or a processor, under several names, and the published folders
    # go by another one.
    index = find_index(folder)
    named = re.sub(r'"(T5|Gemma)Tokenizer"', r'"\1TokenizerFast"', index.read_text())
    named = named.replace('"CLIPImageProcessorPil"', '"CLIPImageProcessor"')
    index.write_text(named.replace('"TokenizersBackend"', '"LlamaTokenizerFast"'))


def _draw_weights(part: nn.Module, gain: float) -> None:
    """Draw matrices and kernels from N(0, gain^2 / fan-in), and move what is constant (biases,
    norms, gates) by .1 N(0, 1). The caller needs no gradients.

    The libraries' own scales suit great widths: at these, the output would hardly depend on the
    prompt.
    """
    import torch

    # constant as constructed: biases 0, norms 1. A gate of exactly 0 would switch its block off.
    for weight in part.parameters():
        if weight.min() == weight.max():
            weight.add_(torch.randn_like(weight), alpha=0.1)
        elif weight.ndim > 1:
            weight.normal_(std=gain * weight[0].numel() ** -0.5)
