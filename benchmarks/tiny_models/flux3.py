"""A tiny FLUX.3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffusers import Flux3ModularPipeline, Flux3Transformer2DModel

from benchmarks.tiny_models.flux2_klein import flux2_klein
from benchmarks.tiny_models.parts import build_qwen3_vl
from benchmarks.tiny_models.tokenizers import build_qwen3_tokenizer
from ebbflow.models.families.flux3 import Flux3Model
from ebbflow.recipe.base_folder import MODULAR_INDEX

WIDTH = 16
LAYERS = 32
"""The blocks read the states behind every fourth layer up to this one."""


def flux3() -> Flux3ModularPipeline:
    """The parts of FLUX.3, without the language model that rewrites prompts."""
    # the VAE is that of FLUX.2
    vae = flux2_klein().vae
    tokenizer = build_qwen3_tokenizer()
    transformer = Flux3Transformer2DModel(
        in_channels=4 * vae.config.latent_channels,
        cond_in_channels=4 * vae.config.latent_channels,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8 * WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
    )
    pipeline = _SavedInOneFolder(Flux3Model.build_blocks())
    pipeline.update_components(
        text_encoder=build_qwen3_vl(tokenizer, WIDTH, LAYERS), transformer=transformer, vae=vae
    )
    pipeline.text_tokenizer = tokenizer
    return pipeline


# mypy cannot follow diffusers' lazy modules.
class _SavedInOneFolder(Flux3ModularPipeline):  # type: ignore[misc, unused-ignore]
    """Writes the index by hand: diffusers' own names the folder that it wrote to."""

    def save_pretrained(self, folder: Path) -> None:
        index: dict[str, Any] = {
            "_class_name": "Flux3ModularPipeline",
            "_blocks_class_name": "Flux3AutoBlocks",
        }
        for spec in self.blocks.expected_components:
            part = getattr(self, spec.name)
            if spec.default_creation_method == "from_config":
                continue
            if part is not None:
                part.save_pretrained(folder / spec.name)
            library = spec.type_hint.__module__.split(".")[0]
            entry = [library, spec.type_hint.__name__]
            index[spec.name] = [*entry, {"type_hint": entry, "subfolder": spec.name}]
        # its class needs torchvision, for images that nobody shows it
        self.text_tokenizer.save_pretrained(folder / "tokenizer")
        (folder / MODULAR_INDEX).write_text(json.dumps(index, indent=2) + "\n")
