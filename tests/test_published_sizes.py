"""The sizes of published models and of the networks of rewards: those of the same classes with
other configurations, and the hub's numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import nn
from transformers import (
    ClapConfig,
    ClapModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLModel,
    SwinConfig,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from ebbflow.models.families import load_adapter
from ebbflow.models.sizes import measure_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.registry import REWARDS
from tests.parameters import count_parameters

SD35 = "stabilityai/stable-diffusion-3.5-medium"
FLUX = "black-forest-labs/FLUX.1-dev"
QWEN = "Qwen/Qwen-Image"
WAN = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"

CLIP_L = CLIPTextConfig(
    hidden_size=768,
    intermediate_size=3072,
    projection_dim=768,
    num_hidden_layers=12,
    num_attention_heads=12,
).to_dict()
CLIP_G = CLIPTextConfig(
    hidden_size=1280,
    intermediate_size=5120,
    projection_dim=1280,
    num_hidden_layers=32,
    num_attention_heads=20,
).to_dict()
T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
QWEN_VL = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
}
TRANSFORMERS = {
    SD35: lambda: SD3Transformer2DModel(
        num_layers=24,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    ),
    FLUX: lambda: FluxTransformer2DModel(guidance_embeds=True),
    QWEN: lambda: QwenImageTransformer2DModel(),
    WAN: lambda: WanTransformer3DModel(
        num_layers=30, num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336
    ),
}
PARTS = {
    "CLIP_L": lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L)),
    "CLIP_L_PROJECTED": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_L)),
    "CLIP_G": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G)),
    "T5_XXL": lambda: T5EncoderModel(T5Config(vocab_size=32128, **T5_XXL)),
    "UMT5_XXL": lambda: UMT5EncoderModel(UMT5Config(vocab_size=256384, **T5_XXL)),
    "QWEN25_VL_7B": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(**QWEN_VL, tie_word_embeddings=False)
    ),
    "VAE_16_CHANNELS": lambda: AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ),
    "VAE_QWEN": lambda: AutoencoderKLQwenImage(),
    "VAE_WAN22": lambda: AutoencoderKLWan(
        base_dim=160,
        decoder_base_dim=256,
        z_dim=48,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ),
}


FAMILY = {SD35: "sd3", FLUX: "flux", QWEN: "qwen_image", WAN: "wan"}
OTHERS = {
    SD35: ("CLIP_L_PROJECTED", "CLIP_G", "T5_XXL", "VAE_16_CHANNELS"),
    FLUX: ("CLIP_L", "T5_XXL", "VAE_16_CHANNELS"),
    QWEN: ("QWEN25_VL_7B", "VAE_QWEN"),
    WAN: ("UMT5_XXL", "VAE_WAN22"),
}
"""The text encoders and the VAE of each."""
PARAMETERS = {
    SD35: 2_243_171_520,
    FLUX: 11_901_408_320,
    QWEN: 20_430_401_088,
    WAN: 4_999_787_712,
    "CLIP_L": 123_060_480,
    "CLIP_L_PROJECTED": 123_650_304,
    "CLIP_G": 694_659_840,
    "T5_XXL": 4_762_310_656,
    "UMT5_XXL": 5_680_910_336,
    "QWEN25_VL_7B": 8_292_166_656,
    "VAE_16_CHANNELS": 83_819_683,
    "VAE_QWEN": 126_892_531,
    "VAE_WAN22": 704_688_668,
}


def clip(width, layers, text_width, text_layers):
    text = {
        "hidden_size": text_width,
        "intermediate_size": 4 * text_width,
        "num_hidden_layers": text_layers,
    }
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "patch_size": 14,
    }
    heads = {"num_attention_heads": 16}
    return CLIPModel(
        CLIPConfig(
            text_config=text | heads, vision_config=vision | heads, projection_dim=text_width
        )
    )


def measure_published(name: str, family: str):
    frames = 5 if family == "wan_flf2v" else 1
    model = ModelConfig(family=family, path=name, revision="0" * 40, frames=frames)
    return measure_model(model)[0]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_published_transformer_is_as_large_as_its_class_builds_it(name):
    with torch.device("meta"):
        transformer = TRANSFORMERS[name]()
    layers = {
        key: layer for key, layer in transformer.named_modules() if isinstance(layer, nn.Linear)
    }
    sizes = measure_published(name, FAMILY[name])
    assert sizes.parameters == count_parameters(transformer) == PARAMETERS[name]
    assert (
        sizes.buffers
        == sum(value.numel() for value in transformer.state_dict().values()) - sizes.parameters
    )
    assert sizes.linears == {
        key: (layer.in_features, layer.out_features) for key, layer in layers.items()
    }
    config = transformer.config
    assert sizes.width == config.num_attention_heads * config.attention_head_dim
    assert sizes.blocks == config.num_layers + config.get("num_single_layers", 0)
    assert sizes.text_width == config.get("joint_attention_dim", config.get("text_dim"))
    part = load_adapter(FAMILY[name]).published[name]["transformer"]
    assert {key: config[key] for key in part.config} == part.config


@pytest.mark.parametrize("name", PARTS)
def test_a_published_part_is_as_large_as_its_class_builds_it(name):
    with torch.device("meta"):
        part = PARTS[name]()
    assert PARAMETERS[name] == count_parameters(part)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_published_model_has_the_text_encoders_and_the_vae_of_these_sizes(name):
    *encoders, vae = OTHERS[name]
    sizes = measure_published(name, FAMILY[name])
    assert (sizes.text_encoders, sizes.vae) == (
        sum(PARAMETERS[part] for part in encoders),
        PARAMETERS[vae],
    )


def test_decoding_takes_three_maps_of_the_widest_block_at_full_resolution():
    """Its input of 256 channels, the norm of it, and the nonlinearity of that, in float32."""
    assert measure_published(SD35, "sd3").decoding == pytest.approx(3 * 256 * 4, rel=0.03)


def test_a_model_for_editing_has_the_parts_of_the_one_that_it_comes_from():
    plain = measure_published(QWEN, "qwen_image")
    editing = measure_published("Qwen/Qwen-Image-Edit", "qwen_image_edit")
    assert editing == replace(plain, vae_encodes_prompts=True)


@pytest.mark.parametrize(
    ("family", "name", "transformer", "encoders", "vae"),
    [
        ("z_image", "Tongyi-MAI/Z-Image", 6_154_908_736, 4_022_468_096, 83_819_683),
        (
            "sana",
            "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
            1_604_641_952,
            2_614_341_888,
            312_250_275,
        ),
        (
            "sana",
            "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
            4_721_825_952,
            2_614_341_888,
            312_250_275,
        ),
        ("flux2", "black-forest-labs/FLUX.2-dev", 32_223_281_152, 24_011_361_280, 84_046_115),
        (
            "hunyuan_video",
            "hunyuanvideo-community/HunyuanVideo",
            12_821_012_544,
            7_628_247_296,
            246_478_803,
        ),
        (
            "hunyuan_video_15",
            "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
            8_326_608_160,
            7_289_934_080,
            1_260_634_115,
        ),
        (
            "wan_flf2v",
            "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
            16_395_536_704,
            6_311_676_416,
            126_892_531,
        ),
        ("qwen_image_21", "Qwen/Qwen-Image-2.1", 7_115_124_736, 8_767_123_696, 337_740_404),
        ("ltx_video", "Lightricks/LTX-Video", 1_923_385_472, 4_762_310_656, 419_193_649),
        (
            "ltx2",
            "Lightricks/LTX-2",
            18_876_174_592,
            12_187_325_040 + 1_431_475_200,
            1_222_479_601 + 108_840_948,
        ),
        ("lumina2", "Alpha-VLLM/Lumina-Image-2.0", 2_609_769_152, 2_614_341_888, 83_819_683),
        (
            "flux2_klein",
            "black-forest-labs/FLUX.2-klein-base-4B",
            3_875_544_576,
            4_022_468_096,
            84_046_115,
        ),
        (
            "flux2_klein",
            "black-forest-labs/FLUX.2-klein-base-9B",
            9_078_581_248,
            8_190_735_360,
            84_046_115,
        ),
    ],
)
def test_newer_models_have_the_numbers_of_the_hub(family, name, transformer, encoders, vae):
    """Of the networks 6.15, 1.6, 4.7 (SANA's "4.8"), 32, 13, 8.3, 7.1 (14.2 GB), 2, 19, 2.6, 3.9
    (7.75 GB) and 9 billion parameters; of the text encoders Qwen3's 4.02 and 8.19 billion,
    Qwen3-VL's 8.77 (17.5 GB), Gemma 2's 2.61, Mistral Small 3.2's 24.0, Llama 3's 7.5 without its
    head, Qwen2.5-VL's 7.07 without its head and its vision tower but with ByT5, and Gemma 3's
    12.19 with the connectors of LTX-2, whose sound is decoded by .11 billion more than its
    pictures.
    """
    sizes = measure_published(name, family)
    assert (sizes.parameters, sizes.text_encoders, sizes.vae) == (transformer, encoders, vae)


def test_later_models_for_editing_have_the_parts_of_the_earlier_ones():
    plus = measure_published("Qwen/Qwen-Image-Edit-2511", "qwen_image_edit_plus")
    assert plus == measure_published("Qwen/Qwen-Image-Edit", "qwen_image_edit")
    plain = measure_published(FLUX, "flux")
    kontext = measure_published("black-forest-labs/FLUX.1-Kontext-dev", "flux_kontext")
    assert kontext == replace(plain, vae_encodes_prompts=True)


def test_the_networks_of_rewards_are_as_large_as_their_classes_build_them():
    with torch.device("meta"):
        huge = clip(1280, 32, 1024, 24)
        large = clip(1024, 24, 768, 12)
    assert (
        REWARDS["pickscore"].num_parameters
        == REWARDS["hps"].num_parameters
        == count_parameters(huge)
    )
    assert (
        REWARDS["clipscore"].num_parameters
        == REWARDS["aesthetic"].num_parameters
        == count_parameters(large)
    )


def test_clap_is_as_large_as_transformers_builds_it():
    with torch.device("meta"):
        network = ClapModel(ClapConfig())
    assert REWARDS["clap"].num_parameters == count_parameters(network)


def test_geneval_has_a_mask2former_and_a_large_clip():
    stages = {
        "depths": [2, 2, 18, 2],
        "embed_dim": 96,
        "num_heads": [3, 6, 12, 24],
        "window_size": 7,
    }
    backbone = SwinConfig(**stages, out_features=["stage1", "stage2", "stage3", "stage4"])
    with torch.device("meta"):
        detector = Mask2FormerForUniversalSegmentation(
            Mask2FormerConfig(backbone_config=backbone, num_labels=80)
        )
    assert (
        REWARDS["geneval"].num_parameters
        == count_parameters(detector) + REWARDS["clipscore"].num_parameters
    )


def test_hpsv3_is_a_qwen2_vl_with_one_more_token_and_a_head():
    published = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    }
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    config = Qwen2VLConfig(
        **published, num_key_value_heads=4, vocab_size=151657 + 1, rope_scaling=scaling
    )
    with torch.device("meta"):
        network = Qwen2VLModel(config)
        head = nn.Sequential(nn.Linear(3584, 1024), nn.Linear(1024, 16), nn.Linear(16, 2))
    assert REWARDS["hpsv3"].num_parameters == count_parameters(network) + count_parameters(head)


def test_videoalign_is_a_qwen2_vl_with_three_more_tokens_and_a_head():
    published = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    vision = {"hidden_size": 1536}
    sizes = {
        "num_key_value_heads": 2,
        "vocab_size": 151657 + 3,
        "rope_scaling": scaling,
        "vision_config": vision,
    }
    with torch.device("meta"):
        network = Qwen2VLModel(Qwen2VLConfig(**published, **sizes))
    assert REWARDS["videoalign"].num_parameters == count_parameters(network) + 1536
