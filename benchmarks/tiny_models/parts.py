"""Small text encoders and VAEs that more than one tiny model has."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)


def build_image_vae(shift: float, scale: float) -> AutoencoderKL:
    """Eight pixels to a latent; 4 latent channels instead of 16."""
    # four blocks with three downsamplings, as published: the factor of 8 is what adapters rely on
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=128,
        shift_factor=shift,
        scaling_factor=scale,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_clip(
    kind: type[CLIPTextModel], tokenizer: CLIPTokenizer, width: int, activation: str
) -> CLIPTextModel:
    # The pooled embedding is the state at the end token, which the model finds by its id: the
    # special ids must be the tokenizer's.
    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            projection_dim=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_act=activation,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_t5(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_sizes(tokenizer, width)))


def build_umt5(tokenizer: T5Tokenizer, width: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer, width)))


def build_qwen3(
    kind: type[Qwen3Model], tokenizer: Qwen2Tokenizer, width: int, layers: int
) -> Qwen3Model:
    # head_dim is set: Qwen3's own default, 128, does not follow from the width
    return kind(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def build_qwen3_vl(
    tokenizer: Qwen2Tokenizer, width: int, layers: int
) -> Qwen3VLForConditionalGeneration:
    text: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
        # sections of time, height and width: half of the head in all
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
    }
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    )


def build_gemma2(tokenizer: GemmaTokenizer, width: int) -> Gemma2Model:
    # two query heads share a key and value head, as in the published model
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
        )
    )


def build_gemma3(
    tokenizer: GemmaTokenizer, width: int, layers: int
) -> Gemma3ForConditionalGeneration:
    """Build a text encoder with a network for images that no text goes through."""
    # its checkpoint has both, and the pipeline loads the class for both
    text = {
        "query_pre_attn_scalar": 8,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": len(tokenizer),
    }
    vision = {
        "model_type": "siglip_vision_model",
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    }
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text | sizes | {"num_hidden_layers": layers},
            vision_config=vision | sizes | {"num_hidden_layers": 1},
            mm_tokens_per_image=4,
        )
    )


def _t5_sizes(tokenizer: T5Tokenizer, width: int) -> dict[str, Any]:
    # gated-gelu and untied embeddings make it T5 1.1 (and UMT5), which the published models use
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": 8,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
