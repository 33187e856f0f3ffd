"""A tiny FLUX.2 [dev]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffusers import Flux2Pipeline, Flux2Transformer2DModel
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from benchmarks.tiny_models.flux2_klein import flux2_klein
from benchmarks.tiny_models.tokenizers import build_mistral_tokenizer
from ebbflow.recipe.base_folder import INDEX

WIDTH = 16
LAYERS = 31
"""The pipeline reads the states behind the layers 10, 20 and 30."""


def flux2() -> Flux2Pipeline:
    """The layout of FLUX.2 [dev]."""
    # scheduler and VAE are those of klein; the transformer takes guidance as an input
    parts = flux2_klein().components
    tokenizer = build_mistral_tokenizer()
    transformer = Flux2Transformer2DModel.from_config(
        {**parts["transformer"].config, "guidance_embeds": True}
    )
    encoder = _build_mistral(len(tokenizer))
    pipeline = _SavedWithProcessor(parts["scheduler"], parts["vae"], encoder, None, transformer)
    pipeline.text_tokenizer = tokenizer
    return pipeline


def _build_mistral(vocabulary: int) -> Mistral3ForConditionalGeneration:
    # deep and narrow: 31 layers, as the pipeline names layers by number
    text: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
    }
    text |= {
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": vocabulary,
        "sliding_window": None,
    }
    vision: dict[str, Any] = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "image_size": 28,
    }
    vision |= {"num_attention_heads": 2, "patch_size": 14}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


# mypy cannot follow diffusers' lazy modules.
class _SavedWithProcessor(Flux2Pipeline):  # type: ignore[misc, unused-ignore]
    """Writes the processor's files by hand: its class needs torchvision, for images that nobody
    shows it.
    """

    text_tokenizer: Any

    def save_pretrained(self, folder: Path) -> None:
        # The index that is written says "no tokenizer" and the name of this class.
        super().save_pretrained(folder)
        index = json.loads((folder / INDEX).read_text())
        index |= {"_class_name": "Flux2Pipeline", "tokenizer": ["transformers", "PixtralProcessor"]}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        self.text_tokenizer.save_pretrained(folder / "tokenizer")
        pictures = {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 14,
            "processor_class": "PixtralProcessor",
        }
        processor = {
            "patch_size": 14,
            "spatial_merge_size": 2,
            "processor_class": "PixtralProcessor",
        }
        for name, content in {
            "preprocessor_config.json": pictures,
            "processor_config.json": processor,
        }.items():
            (folder / "tokenizer" / name).write_text(json.dumps(content, indent=2) + "\n")
