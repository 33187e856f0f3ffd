"""Tiny models with random weights, in the folder layouts that the published ones have on the Hugging Face hub.

``diffusers.DiffusionPipeline.from_pretrained`` loads every part of such a folder without a network. Classes, configuration keys,
schedulers, special tokens, latent shift and scale are those of the published models; widths, depths and vocabularies are as small
as the architectures allow. The pictures are noise that depends on the prompt: made for tests and smoke runs.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.utils.logging import disable_progress_bar

from ebbflow.models.base import ModelError

SENTENCES = (
    'A sign that says "OPEN" hangs above the door of a small bakery.',
    'A red bicycle leans against a blue wall, next to a poster that reads "SALE 50%".',
    "Two cats and three dogs sleep on a green sofa in the evening light.",
    "a photo of a yellow bird to the left of a purple cup",
    "An astronaut rides a white horse across the desert, oil painting.",
    'The word "HELLO" is written in the sand by a child.',
    "A bowl of ripe fruit: 4 apples, 2 oranges and a bunch of grapes.",
    "The old fisherman mends his net while seagulls circle over the harbour.",
    'Neon letters spell "EBB & FLOW" over a dark street after the rain.',
    "A close-up portrait of a woman with curly hair; soft light, film grain.",
    "There's a mountain behind the lake, and the lake doesn't have a single wave.",
    'A chalkboard with the text "E = mc^2" and the date 1905.',
    "It's 7:30 on the clock of the railway station, platform 12 is empty.",
    "A robot made of copper waters tomatoes (and herbs) on a balcony.",
    'A t-shirt printed with "NO. 1 DAD", folded on a wooden table.',
    "Snow falls on a village; smoke rises from every chimney.",
    "A wide aerial view of rice terraces, the sky full of clouds.",
    'The label of the bottle reads "Vintage 1986", the glass beside it is half full.',
    "A dancer turns slowly while the camera moves around the stage.",
    "Waves roll over the beach, and a boat passes from right to left.",
    "What does the fox see? A quiet forest!",
    "Make the background brighter and change the colour of the car to black.",
    "blurry, low quality, distorted, watermark, extra fingers",
    "A cup of coffee, a stack of books, a pair of glasses and a pencil on a desk.",
)
"""What the tokenizers are trained on."""

CLIP_START, END_OF_TEXT = "<|startoftext|>", "<|endoftext|>"
QWEN_SPECIALS = (
    END_OF_TEXT,
    *("<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
BYTES = sorted(ByteLevel.alphabet())
"""The letters that stand for the 256 bytes, in the published order: "!", with which SD3 pads, has id 0."""
PROMPT_BY_ATTENTION = (QwenImageTransformer2DModel, WanTransformer3DModel)
"""Transformers that see the prompt through attention alone, which averages most of it away when weights are small."""


def build_tiny(family: str, folder: Path, seed: int = 0) -> None:
    """Write a tiny model of one of ``TINY_FAMILIES`` to a new or empty folder; the same seed gives the same bytes.

    Raises:
        ModelError: there is no such family, or the folder holds something already.
    """
    if family not in TINY_FAMILIES:
        raise ModelError(f"there is no tiny model of family {family!r}; take one of {', '.join(TINY_FAMILIES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} holds something already; name a new folder for the tiny {family} model")
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = TINY_FAMILIES[family]()
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                _draw_weights(part, gain=1.4 if isinstance(part, PROMPT_BY_ATTENTION) else 1.0)
    pipeline.save_pretrained(folder)
    _name_published_classes(folder / "model_index.json")
    if family == "qwen_image_edit":
        _add_processor(pipeline.tokenizer, folder)


@torch.no_grad()
def _draw_weights(part: nn.Module, gain: float) -> None:
    """Draw matrices and kernels from N(0, gain^2 / fan-in), and move what is constant (biases, norms, gates) by .1 N(0, 1).

    The libraries' own scales suit great widths: at these, the output would hardly depend on the prompt.
    """
    for weight in part.parameters():
        if weight.min() == weight.max():
            weight.add_(torch.randn_like(weight), alpha=0.1)
        elif weight.ndim > 1:
            weight.normal_(std=gain * weight[0].numel() ** -0.5)


def _name_published_classes(index: Path) -> None:
    # transformers 5 has one T5 tokenizer under two names, and the published folders go by the other one.
    index.write_text(index.read_text().replace('"T5Tokenizer"', '"T5TokenizerFast"'))


def _add_processor(tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Make a Qwen-Image folder one of Qwen-Image-Edit, which has the same parts and a processor.

    The processor's files are written by hand: its class needs torchvision, for videos that nobody shows it.
    """
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    tokenizer.save_pretrained(folder / "processor")
    pictures = {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},  # 4 to 16 tokens a picture
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
        "processor_class": "Qwen2VLProcessor",
    }
    for name, kind in {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
    }.items():
        (folder / "processor" / name).write_text(json.dumps(pictures | kind, indent=2) + "\n")


def _sd3() -> StableDiffusion3Pipeline:
    """The layout of Stable Diffusion 3.5 medium."""
    tokenizers = [_clip_tokenizer(), _clip_tokenizer(pad="!"), _t5_tokenizer()]
    encoders = [
        _clip(CLIPTextModelWithProjection, tokenizers[0], width=16, activation="quick_gelu"),
        _clip(CLIPTextModelWithProjection, tokenizers[1], width=24, activation="gelu"),
        _t5(tokenizers[2], width=48),
    ]
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=48,
        caption_projection_dim=32,
        pooled_projection_dim=16 + 24,
        pos_embed_max_size=48,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        _image_vae(shift=0.0609, scale=1.5305),
        *(part for pair in zip(encoders, tokenizers, strict=True) for part in pair),
    )


def _flux() -> FluxPipeline:
    """The layout of FLUX.1 dev."""
    tokenizer, tokenizer_2 = _clip_tokenizer(), _t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=48,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    return FluxPipeline(
        scheduler,
        _image_vae(shift=0.1159, scale=0.3611),
        _clip(CLIPTextModel, tokenizer, width=16, activation="quick_gelu"),
        tokenizer,
        _t5(tokenizer_2, width=48),
        tokenizer_2,
        transformer,
    )


def _qwen_image() -> QwenImagePipeline:
    tokenizer = _qwen_tokenizer()
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    transformer = QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
    )
    vae = AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1)
    return QwenImagePipeline(scheduler, vae, _qwen_vl(tokenizer), tokenizer, transformer)


def _qwen_vl(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def _wan(vae: AutoencoderKLWan, flow_shift: float, expand_timesteps: bool) -> WanPipeline:
    tokenizer = _t5_tokenizer()
    transformer = WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=vae.config.z_dim,
        out_channels=vae.config.z_dim,
        text_dim=32,
        ffn_dim=64,
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
    return WanPipeline(tokenizer, _umt5(tokenizer, width=32), vae, scheduler, transformer, expand_timesteps=expand_timesteps)


def _wan22() -> WanPipeline:
    """The layout of Wan 2.2 TI2V 5B."""
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    return _wan(vae, flow_shift=5.0, expand_timesteps=True)


def _wan21() -> WanPipeline:
    """The layout of Wan 2.1 T2V 1.3B."""
    return _wan(AutoencoderKLWan(base_dim=4, num_res_blocks=1), flow_shift=3.0, expand_timesteps=False)


def _image_vae(shift: float, scale: float) -> AutoencoderKL:
    """Eight pixels to a latent; 4 latent channels instead of 16."""
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


def _clip(kind: type[CLIPTextModel], tokenizer: CLIPTokenizer, width: int, activation: str) -> CLIPTextModel:
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


def _t5(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_sizes(tokenizer, width)))


def _umt5(tokenizer: T5Tokenizer, width: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer, width)))


def _t5_sizes(tokenizer: T5Tokenizer, width: int) -> dict[str, Any]:
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


def _clip_tokenizer(pad: str = END_OF_TEXT) -> CLIPTokenizer:
    """Vocabulary in CLIP's order: bytes, bytes that end a word, merges, start, end."""
    letters = [*BYTES, *(f"{letter}</w>" for letter in BYTES)]
    merges = _byte_pairs(CLIPTokenizer(), SENTENCES, letters, 300, suffix="</w>")
    words = [*letters, *map("".join, merges), CLIP_START, END_OF_TEXT]
    return CLIPTokenizer(_numbered(words), merges, pad_token=pad, model_max_length=77)


def _t5_tokenizer() -> T5Tokenizer:
    """A unigram vocabulary of 400 pieces. Its pieces are byte pairs and its scores their frequencies.

    (The unigram trainer of the tokenizers library depends on the order of a hash table: no two runs give the same bytes.)
    """
    specials = ["<pad>", "</s>", "<unk>"]
    letters = ["▁", *string.ascii_letters, *string.digits, *string.punctuation]
    splitter = T5Tokenizer()
    merges = _byte_pairs(splitter, SENTENCES, letters, 400 - len(specials) - len(letters))
    pieces = [*letters, *map("".join, merges)]
    text = "".join(
        word for sentence in SENTENCES for word, _ in splitter.backend_tokenizer.pre_tokenizer.pre_tokenize_str(sentence)
    )
    scores = [(piece, math.log((text.count(piece) + 1) / len(text))) for piece in pieces]
    return T5Tokenizer([*((special, 0.0) for special in specials), *scores], model_max_length=512)


def _qwen_tokenizer() -> Qwen2Tokenizer:
    """Vocabulary in Qwen's order: bytes, merges, special tokens.

    The pipelines cut the head of their prompt template off after 34 (image) or 64 (edit) tokens, which fits when every word of
    the head is one token. So the templates are what the merges are trained on most.
    """
    heads = [pipeline.prompt_template_encode.split("<|vision_start|>")[0].split("{}")[0] for pipeline in _empty_qwen_pipelines()]
    merges = _byte_pairs(Qwen2Tokenizer(), [*SENTENCES, *100 * heads], BYTES, 500)
    words = [*BYTES, *map("".join, merges), *QWEN_SPECIALS]
    return Qwen2Tokenizer(
        _numbered(words),
        merges,
        eos_token="<|im_end|>",
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(QWEN_SPECIALS),
        model_max_length=131072,
    )


def _empty_qwen_pipelines() -> list[QwenImagePipeline | QwenImageEditPipeline]:
    parts = dict.fromkeys(["scheduler", "vae", "text_encoder", "tokenizer", "transformer"])
    return [QwenImagePipeline(**parts), QwenImageEditPipeline(**parts, processor=None)]


def _byte_pairs(
    like: PreTrainedTokenizerFast, sentences: Sequence[str], letters: Sequence[str], count: int, suffix: str = ""
) -> list[tuple[str, str]]:
    """``count`` merges of ``letters``, trained on sentences that are normalised and split as the tokenizer ``like`` does.

    ``suffix`` marks the last letter of a word.
    """
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    tokenizer.normalizer = like.backend_tokenizer.normalizer
    tokenizer.pre_tokenizer = like.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + count,
        special_tokens=list(letters),  # numbers them, by which equal counts are ordered; else a hash table decides
        limit_alphabet=0,
        end_of_word_suffix=suffix,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def _numbered(words: Sequence[str]) -> dict[str, int]:
    return {word: index for index, word in enumerate(words)}


TINY_FAMILIES: dict[str, Callable[[], DiffusionPipeline]] = {
    "sd3": _sd3,
    "qwen_image": _qwen_image,
    "qwen_image_edit": _qwen_image,
    "flux": _flux,
    "wan": _wan22,
    "wan21": _wan21,
}
