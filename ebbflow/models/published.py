"""The configurations of published models, as far as the sizes of their parts follow from them.

They are those of the repositories on the Hugging Face hub; ``ebbflow.models.sizes`` builds the parts from them, without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part of a pipeline.

    Attributes:
        library: ``diffusers`` or ``transformers``.
        kind: its class there.
        config: the keys of its configuration that differ from the class's defaults and decide its size.
        bytes: of a number, as it is published.
    """

    library: str
    kind: str
    config: Mapping[str, Any]
    bytes: int = 2


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
XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
T5_XXL = Part("transformers", "T5EncoderModel", XXL | {"vocab_size": 32128})
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
QWEN_VL_7B = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
    "tie_word_embeddings": False,
}
QWEN_IMAGE = {
    "transformer": Part("diffusers", "QwenImageTransformer2DModel", {}),
    "text_encoder": Part("transformers", "Qwen2_5_VLForConditionalGeneration", QWEN_VL_7B),
    "vae": Part("diffusers", "AutoencoderKLQwenImage", {}),
}

PUBLISHED: dict[str, dict[str, Part]] = {
    "stabilityai/stable-diffusion-3.5-medium": {
        "transformer": Part(
            "diffusers",
            "SD3Transformer2DModel",
            {
                "num_layers": 24,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "caption_projection_dim": 1536,
                "pooled_projection_dim": 2048,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
            },
        ),
        "text_encoder": Part("transformers", "CLIPTextModelWithProjection", CLIP_L),
        "text_encoder_2": Part("transformers", "CLIPTextModelWithProjection", CLIP_G),
        "text_encoder_3": T5_XXL,
        "vae": IMAGE_VAE,
    },
    "black-forest-labs/FLUX.1-dev": {
        "transformer": Part("diffusers", "FluxTransformer2DModel", {"guidance_embeds": True}),
        "text_encoder": Part("transformers", "CLIPTextModel", CLIP_L),
        "text_encoder_2": T5_XXL,
        "vae": IMAGE_VAE,
    },
    "Qwen/Qwen-Image": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit": QWEN_IMAGE,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": {
        "transformer": Part(
            "diffusers",
            "WanTransformer3DModel",
            {"num_layers": 30, "num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336},
            bytes=4,
        ),
        "text_encoder": Part("transformers", "UMT5EncoderModel", XXL | {"vocab_size": 256384}),
        "vae": Part(
            "diffusers",
            "AutoencoderKLWan",
            {
                "base_dim": 160,
                "decoder_base_dim": 256,
                "z_dim": 48,
                "is_residual": True,
                "in_channels": 12,
                "out_channels": 12,
                "patch_size": 2,
                "scale_factor_spatial": 16,
            },
            bytes=4,
        ),
    },
}
"""The parts of each repository that have weights, by its id."""
