"""A tiny FLUX.3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffusers import Flux3ModularPipeline, Flux3Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.tiny_models.flux2_klein import flux2_klein
from benchmarks.tiny_models.tokenizers import build_qwen3_tokenizer
from ebbflow.models.families.flux3 import Flux3Model
from ebbflow.models.folder import MODULAR_INDEX

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
        text_encoder=_build_qwen3_vl(len(tokenizer)), transformer=transformer, vae=vae
    )
    pipeline.text_tokenizer = tokenizer
    return pipeline


def _build_qwen3_vl(vocabulary: int) -> Qwen3VLForConditionalGeneration:
    # deep and narrow, as the blocks name layers by number
    text: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": vocabulary,
        # sections of time, height and width: half of the head in all
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    )


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
