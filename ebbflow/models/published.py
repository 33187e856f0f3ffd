"""The configurations of published parts that more than one family has, as far as their sizes follow
from them.

They are those of the repositories on the Hugging Face hub; ``ebbflow.models.sizes`` builds the
parts from them, without weights. A family's file has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part of a pipeline.

    Attributes:
        library: ``diffusers``, ``transformers``, or one of the packages in ``diffusers.pipelines``.
        kind: its class there.
        config: the keys of its configuration that differ from the class's defaults and decide its
            size.
        bytes: of a number, as it is published.

    Example:
        >>> Part("transformers", "T5EncoderModel", {"d_model": 4096, "num_layers": 24})
    """

    library: str
    kind: str
    config: Mapping[str, Any]
    bytes: int = 2


Published = Mapping[str, Mapping[str, Part]]
"""The parts that have weights of each repository, by its id."""
# Text encoders and the VAE that several families share.
CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
}
XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
# UMT5, of Wan, has the same sizes and a larger vocabulary.
T5_XXL = Part("transformers", "T5EncoderModel", XXL | {"vocab_size": 32128})
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
IMAGE_VAE = Part(
    "diffusers",
    "AutoencoderKL",
    {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
)
