"""A tiny HunyuanVideo-1.5."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)

from benchmarks.tiny_models.tokenizers import build_hunyuan_qwen_tokenizer


def _build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLTextModel:
    return Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,  # the pipeline skips the last two
            num_attention_heads=2,
            num_key_value_heads=1,
            # sections of time, height and width: half of the head's 16 dimensions in all
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
            bos_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def hunyuan_video_15() -> HunyuanVideo15Pipeline:
    """The layout of HunyuanVideo-1.5, text to video; four latent channels instead of 32."""
    tokenizer = build_hunyuan_qwen_tokenizer()
    text_encoder = _build_text_encoder(tokenizer)
    # bytes, as published, so that any text has tokens
    tokenizer_2 = ByT5Tokenizer()
    text_encoder_2 = T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer_2),
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )
    transformer = HunyuanVideo15Transformer3DModel(
        # latents, those of an image, and the mask of its frame
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )
    # 16 x 16 pixels and 4 frames to a latent, as published
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 16, 16), layers_per_block=1
    )
    return HunyuanVideo15Pipeline(
        text_encoder,
        tokenizer,
        transformer,
        vae,
        FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2,
        tokenizer_2,
        ClassifierFreeGuidance(guidance_scale=6.0),
    )
