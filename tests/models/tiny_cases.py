"""The published layout of each tiny model: its pipeline, and the class of each part."""

from __future__ import annotations

from diffusers import (
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux3ModularPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideoPipeline,
    LTX2Pipeline,
    LTXPipeline,
    Lumina2Pipeline,
    QwenImage21Pipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    SanaPipeline,
    StableDiffusion3Pipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    ZImagePipeline,
)

CLIP = "CLIPTokenizer"
CLIP_PICTURES = "CLIPImageProcessor"
T5 = "T5TokenizerFast"
QWEN = {
    "scheduler": "FlowMatchEulerDiscreteScheduler",
    "text_encoder": "Qwen2_5_VLForConditionalGeneration",
    "tokenizer": "Qwen2Tokenizer",
    "transformer": "QwenImageTransformer2DModel",
    "vae": "AutoencoderKLQwenImage",
}
WAN = {
    "scheduler": "UniPCMultistepScheduler",
    "text_encoder": "UMT5EncoderModel",
    "tokenizer": T5,
    "transformer": "WanTransformer3DModel",
    "transformer_2": None,
    "vae": "AutoencoderKLWan",
}
PUBLISHED = {
    "sd3": (
        StableDiffusion3Pipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "CLIPTextModelWithProjection",
            "text_encoder_2": "CLIPTextModelWithProjection",
            "text_encoder_3": "T5EncoderModel",
            "tokenizer": CLIP,
            "tokenizer_2": CLIP,
            "tokenizer_3": T5,
            "transformer": "SD3Transformer2DModel",
            "vae": "AutoencoderKL",
            "feature_extractor": None,
            "image_encoder": None,
        },
    ),
    "qwen_image": (QwenImagePipeline, QWEN),
    "qwen_image_21": (
        QwenImage21Pipeline,
        {
            "processor": "Qwen3VLProcessor",
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "Qwen3VLForConditionalGeneration",
            "transformer": "QwenImage21Transformer2DModel",
            "vae": "AutoencoderKLQwenImage21",
        },
    ),
    "qwen_image_edit": (QwenImageEditPipeline, QWEN | {"processor": "Qwen2VLProcessor"}),
    "flux": (
        FluxPipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "CLIPTextModel",
            "text_encoder_2": "T5EncoderModel",
            "tokenizer": CLIP,
            "tokenizer_2": T5,
            "transformer": "FluxTransformer2DModel",
            "vae": "AutoencoderKL",
            "feature_extractor": None,
            "image_encoder": None,
        },
    ),
    "wan": (WanPipeline, WAN),
    "wan21": (WanPipeline, WAN),
    "wan_a14b": (WanPipeline, WAN | {"transformer_2": "WanTransformer3DModel"}),
    "wan_i2v": (
        WanImageToVideoPipeline,
        WAN
        | {
            "transformer_2": "WanTransformer3DModel",
            "image_encoder": None,
            "image_processor": None,
        },
    ),
    "wan_flf2v": (
        WanImageToVideoPipeline,
        WAN | {"image_encoder": "CLIPVisionModel", "image_processor": CLIP_PICTURES},
    ),
    "z_image": (
        ZImagePipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "Qwen3Model",
            "tokenizer": "Qwen2Tokenizer",
            "transformer": "ZImageTransformer2DModel",
            "vae": "AutoencoderKL",
        },
    ),
    "flux2_klein": (
        Flux2KleinPipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "Qwen3ForCausalLM",
            "tokenizer": "Qwen2Tokenizer",
            "transformer": "Flux2Transformer2DModel",
            "vae": "AutoencoderKLFlux2",
        },
    ),
    "hunyuan_video": (
        HunyuanVideoPipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "LlamaModel",
            "text_encoder_2": "CLIPTextModel",
            "tokenizer": "LlamaTokenizerFast",
            "tokenizer_2": CLIP,
            "transformer": "HunyuanVideoTransformer3DModel",
            "vae": "AutoencoderKLHunyuanVideo",
        },
    ),
    "flux3": (
        Flux3ModularPipeline,
        {
            "text_encoder": "Qwen3VLForConditionalGeneration",
            "tokenizer": "AutoProcessor",
            "transformer": "Flux3Transformer2DModel",
            "vae": "AutoencoderKLFlux2",
        },
    ),
    "hunyuan_video_15": (
        HunyuanVideo15Pipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "guider": "ClassifierFreeGuidance",
            "text_encoder": "Qwen2_5_VLTextModel",
            "text_encoder_2": "T5EncoderModel",
            "tokenizer": "Qwen2Tokenizer",
            "tokenizer_2": "ByT5Tokenizer",
            "transformer": "HunyuanVideo15Transformer3DModel",
            "vae": "AutoencoderKLHunyuanVideo15",
        },
    ),
    "ltx_video": (
        LTXPipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "T5EncoderModel",
            "tokenizer": T5,
            "transformer": "LTXVideoTransformer3DModel",
            "vae": "AutoencoderKLLTXVideo",
        },
    ),
    "ltx2": (
        LTX2Pipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "Gemma3ForConditionalGeneration",
            "tokenizer": "GemmaTokenizerFast",
            "connectors": "LTX2TextConnectors",
            "transformer": "LTX2VideoTransformer3DModel",
            "vae": "AutoencoderKLLTX2Video",
            "audio_vae": "AutoencoderKLLTX2Audio",
            "vocoder": "LTX2Vocoder",
            "processor": None,
            "prompt_enhancer": None,
            "duration_head": None,
        },
    ),
    "lumina2": (
        Lumina2Pipeline,
        {
            "scheduler": "FlowMatchEulerDiscreteScheduler",
            "text_encoder": "Gemma2Model",
            "tokenizer": "GemmaTokenizerFast",
            "transformer": "Lumina2Transformer2DModel",
            "vae": "AutoencoderKL",
        },
    ),
    "sana": (
        SanaPipeline,
        {
            "scheduler": "DPMSolverMultistepScheduler",
            "text_encoder": "Gemma2Model",
            "tokenizer": "GemmaTokenizerFast",
            "transformer": "SanaTransformer2DModel",
            "vae": "AutoencoderDC",
        },
    ),
    "qwen_image_edit_plus": (QwenImageEditPlusPipeline, QWEN | {"processor": "Qwen2VLProcessor"}),
}
KLEIN = PUBLISHED["flux2_klein"][1]
FLUX2_DEV = KLEIN | {
    "text_encoder": "Mistral3ForConditionalGeneration",
    "tokenizer": "PixtralProcessor",
}
PUBLISHED |= dict.fromkeys(("flux2", "flux2_edit"), (Flux2Pipeline, FLUX2_DEV))
PUBLISHED["flux_kontext"] = (FluxKontextPipeline, PUBLISHED["flux"][1])
