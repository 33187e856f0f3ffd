"""A tiny Wan2.1-FLF2V."""

from __future__ import annotations

from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from benchmarks.tiny_models.wan21 import wan21

SIDE = 28


def wan_flf2v() -> WanImageToVideoPipeline:
    """The layout of Wan2.1 FLF2V 14B, whose transformer has places for two images of CLIP."""
    parts = wan21().components
    config = dict(parts["transformer"].config)
    # from_config would take the defaults for what was left at them
    del config["_use_default_values"]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    # 2 x 2 patches and the class token of each of two images
    images = {"image_dim": 16, "added_kv_proj_dim": width, "pos_embed_seq_len": 2 * 5}
    # in_channels: noisy latents, the images' latents and the mask
    channels = {"in_channels": 2 * config["in_channels"] + 4}
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=SIDE // 2,
    )
    parts |= {
        "transformer": WanTransformer3DModel.from_config(config | channels | images),
        "image_encoder": CLIPVisionModel(vision),
        "image_processor": CLIPImageProcessor(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
        ),
    }
    return WanImageToVideoPipeline(**parts)
