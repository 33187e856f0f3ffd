"""The FLUX.2 [klein] family, text to image: base models with classifier-free guidance, and
distilled ones without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import Flux2KleinPipeline

from ebbflow.models.base import ModelError
from ebbflow.models.families.flux2 import FLUX2_VAE, Flux2Backbone
from ebbflow.models.published import QWEN3_4B, Part, Published
from ebbflow.recipe.families import Family
from ebbflow.recipe.model import ModelConfig

FAMILY = Family(
    adapter="Flux2KleinModel",
    pipeline="Flux2KleinPipeline",
    size_multiple=16,
    feature_caches=("taylor_seer", "mag"),
)
QWEN3_8B = QWEN3_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}


def _published_parts(
    blocks: tuple[int, int], heads: int, qwen: Mapping[str, Any]
) -> Mapping[str, Part]:
    """The parts of a model with so many blocks of two streams and of one."""
    config = {
        "num_layers": blocks[0],
        "num_single_layers": blocks[1],
        "num_attention_heads": heads,
        # The pipeline stacks the states of three layers of the text encoder.
        "joint_attention_dim": 3 * qwen["hidden_size"],
        "guidance_embeds": False,
    }
    return {
        "transformer": Part("diffusers", "Flux2Transformer2DModel", config),
        "text_encoder": Part("transformers", "Qwen3ForCausalLM", qwen),
        "vae": FLUX2_VAE,
    }


KLEIN_4B = _published_parts((5, 20), 24, QWEN3_4B)
KLEIN_9B = _published_parts((8, 24), 32, QWEN3_8B)
PUBLISHED: Published = {
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-4B": KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-9B": KLEIN_9B,
    "black-forest-labs/FLUX.2-klein-9B": KLEIN_9B,
}


class Flux2KleinModel(Flux2Backbone):
    """Adapter of ``Flux2KleinPipeline`` without images to edit; its negative prompt is empty, ours
    is the prompt table's.
    """

    pipeline_class = Flux2KleinPipeline
    published = PUBLISHED
    shares_tokens = True

    @classmethod
    def _check_pipeline(cls, pipeline: Any, config: ModelConfig) -> None:
        if config.guidance != 1 and pipeline.config.is_distilled:
            raise ModelError(
                f"model.guidance = {config.guidance}: {config.path} is distilled and takes no"
                " guidance; leave it out, or take a base model"
            )
