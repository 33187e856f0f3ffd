"""A tiny Wan2.2-I2V-A14B."""

from __future__ import annotations

from diffusers import WanImageToVideoPipeline, WanTransformer3DModel

from benchmarks.tiny_models.wan21 import wan21


def wan_i2v() -> WanImageToVideoPipeline:
    """The layout of Wan2.2 I2V A14B: transformers that see four channels of a mask and the latents
    of the image besides.
    """
    parts = wan21().components
    # in_channels: noisy latents, the image's latents and the mask
    config = dict(parts["transformer"].config)
    networks = [
        WanTransformer3DModel.from_config(config | {"in_channels": 2 * config["in_channels"] + 4})
        for _ in range(2)
    ]
    # Wan2.2 has no image encoder, unlike Wan2.1 I2V
    parts |= {
        "transformer": networks[0],
        "transformer_2": networks[1],
        "image_encoder": None,
        "image_processor": None,
    }
    return WanImageToVideoPipeline(**parts, boundary_ratio=0.9)
