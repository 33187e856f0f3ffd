"""Tiny random networks in the layouts in which the rewards' own ones are published, and what is
scored with them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
)

from ebbflow.data.prompts import Prompt
from ebbflow.recipe.registry import configure_reward
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.geneval_rules import CLASSES
from tests.rewards.qwen_cases import (
    HPSV3_HEAD,
    qwen_weights,
    write_qwen_processor,
    write_video_reward,
)
from tests.rewards.weight_cases import draw_weights, fill_weights, linear_shapes, norm_shapes

TEXTS = ["a red cat", "A dog, 3 birds & a SIGN", "", "ocean waves at night", "a red cat"]
PREPROCESSOR = {
    "crop_size": 28,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 28,
}
"""As openai/clip-vit-large-patch14 says it, with 28 pixels instead of 224."""
CLIP_WIDTH = 24
BLIP_WIDTH = 128
BERT_WIDTH = 48
BLIP_SIZE = 32
HPS_SIZE = 28


def some_images(count: int = 5, height: int = 40, width: int = 51) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def as_prompts(*texts: str) -> list[Prompt]:
    return [
        Prompt(index, text, "", None, "test", "train", "{}") for index, text in enumerate(texts)
    ]


def make_reward(name: str, folder: Path, **keys) -> RewardConfig:
    """Write the tiny network of a reward and give the reward's part of a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    if name in ("pickscore", "clipscore"):
        write_clip(folder)
        return configure_reward(name, path=str(folder), **keys)
    if name == "aesthetic":
        write_clip(folder / "clip")
        head = folder / "sac+logos+ava1-l14-linearMSE.pth"
        torch.save(head_weights(CLIP_WIDTH), head)
        return configure_reward(name, path=str(folder / "clip"), head={"path": str(head)}, **keys)
    if name == "hps":
        write_hps_processor(folder / "processor")
        torch.save(
            {"epoch": 1, "state_dict": open_clip_weights()}, folder / "HPS_v2.1_compressed.pt"
        )
        return configure_reward(
            name, path=str(folder), processor={"path": str(folder / "processor")}, **keys
        )
    if name == "hpsv3":
        write_qwen_processor(folder / "processor")
        save_file(qwen_weights(("<|Reward|>",), HPSV3_HEAD), folder / "HPSv3.safetensors")
        return configure_reward(
            name,
            path=str(folder),
            **{"processor": {"path": str(folder / "processor")}, "precision": "float32", **keys},
        )
    if name == "videoalign":
        write_qwen_processor(folder / "processor")
        write_video_reward(folder)
        given = {
            "processor": {"path": str(folder / "processor")},
            "precision": "float32",
            "frame_rate": 8,
        }
        return configure_reward(name, path=str(folder), **given | keys)
    if name == "geneval":
        write_clip(folder / "clip")
        write_detector(folder)
        return configure_reward(name, path=str(folder), clip={"path": str(folder / "clip")}, **keys)
    write_bert_tokenizer(folder / "tokenizer")
    torch.save(blip_weights(), folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    return configure_reward(
        name, path=str(folder), tokenizer={"path": str(folder / "tokenizer")}, **keys
    )


def clip_tokenizer() -> CLIPTokenizer:
    """Bytes, bytes that end a word, two merges, start and end."""
    letters = sorted(ByteLevel.alphabet())
    words = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        "ca",
        "cat</w>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return CLIPTokenizer(
        {word: number for number, word in enumerate(words)},
        [("c", "a"), ("ca", "t</w>")],
        model_max_length=77,
    )


def clip_config(tokenizer: CLIPTokenizer) -> CLIPConfig:
    tower = {"num_hidden_layers": 2, "hidden_act": "gelu", "projection_dim": CLIP_WIDTH}
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": len(tokenizer),
    }
    vision = {
        "hidden_size": 60,
        "intermediate_size": 240,
        "num_attention_heads": 3,
        "image_size": HPS_SIZE,
        "patch_size": 14,
    }
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return CLIPConfig(
        text_config={**tower, **text, **ids},
        vision_config={**tower, **vision},
        projection_dim=CLIP_WIDTH,
    )


def write_clip(folder: Path) -> None:
    """A CLIP, its tokenizer and its preprocessing."""
    tokenizer = clip_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = CLIPModel(clip_config(tokenizer))
    fill_weights(model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def write_detector(folder: Path, seen: str = "dog", labels: int = len(CLASSES)) -> None:
    """A Mask2Former that takes everything for one class, with the names of weights that are
    published.
    """
    stages = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
    backbone = SwinConfig(**stages, out_features=["stage1", "stage2", "stage3", "stage4"])
    sizes = {
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "dim_feedforward": 16,
        "encoder_feedforward_dim": 16,
    }
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 4}
    config = Mask2FormerConfig(backbone_config=backbone, **sizes, **layers, num_labels=labels)
    with torch.random.fork_rng(devices=[]):
        model = Mask2FormerForUniversalSegmentation(config)
    fill_weights(
        {name: weight for name, weight in model.state_dict().items() if name.startswith("model.")}
    )
    with torch.no_grad():
        model.class_predictor.weight.zero_()
        model.class_predictor.bias.zero_()[CLASSES.index(seen)] = 12
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    older = {
        _as_published(name): weight
        for name, weight in weights.items()
        if ".swin.layernorm." not in name
    }
    attention = "model.pixel_level_module.encoder.encoder.layers.0.blocks.0.attention.self"
    index = f"{attention}.relative_position_index"
    save_file(
        older | {index: torch.zeros(16, 16, dtype=torch.long)},
        folder / "model.safetensors",
        {"format": "pt"},
    )


SWIN_NAMES = {
    "encoder.swin.": "encoder.",
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.relative_position_bias.": "attention.self.",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def _as_published(name: str) -> str:
    if name.startswith("model.pixel_level_module.encoder."):
        for new, old in SWIN_NAMES.items():
            name = name.replace(new, old)
    return name


def write_hps_processor(folder: Path) -> None:
    """Of the repository of CLIP-H, what HPS needs."""
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(folder)
    clip_config(tokenizer).save_pretrained(folder)


def write_bert_tokenizer(folder: Path) -> None:
    """BERT's, by letters."""
    BertTokenizer(
        {word: number for number, word in enumerate(BERT_WORDS)}, do_lower_case=True
    ).save_pretrained(folder)


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
BERT_WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *LETTERS,
    ",",
    "&",
    *(f"##{letter}" for letter in LETTERS),
]
MED_CONFIG = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": BERT_WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 64,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(BERT_WORDS) + 2,
    "encoder_width": 768,
    "add_cross_attention": True,
}
"""As published, but for the sizes; the wrong ``encoder_width`` is published too."""


def head_weights(width: int) -> dict[str, torch.Tensor]:
    """Five linear layers under the published names."""
    sizes = {0: (20, width), 2: (12, 20), 4: (8, 12), 6: (6, 8), 7: (1, 6)}
    shapes = {f"layers.{number}.weight": size for number, size in sizes.items()}
    return draw_weights(
        {**shapes, **{f"layers.{number}.bias": size[:1] for number, size in sizes.items()}}
    )


def open_clip_weights() -> dict[str, torch.Tensor]:
    """A ViT under open_clip's names, with the sizes of ``clip_config``."""
    text = 32
    vision = 60
    tokens = len(clip_tokenizer())
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (77, text),
        "text_projection": (text, CLIP_WIDTH),
        "logit_scale": (),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": ((HPS_SIZE // 14) ** 2 + 1, vision),
        "visual.proj": (vision, CLIP_WIDTH),
        "visual.conv1.weight": (vision, 3, 14, 14),
        "token_embedding.weight": (tokens, text),
        **norm_shapes("visual.ln_pre", vision),
        **norm_shapes("visual.ln_post", vision),
        **norm_shapes("ln_final", text),
    }
    for prefix, width, inner in (("", text, 64), ("visual.", vision, 240)):
        for layer in range(2):
            block = f"{prefix}transformer.resblocks.{layer}"
            shapes |= {
                f"{block}.attn.in_proj_weight": (3 * width, width),
                f"{block}.attn.in_proj_bias": (3 * width,),
            }
            shapes |= (
                linear_shapes(f"{block}.attn.out_proj", width, width)
                | norm_shapes(f"{block}.ln_1", width)
                | norm_shapes(f"{block}.ln_2", width)
            )
            shapes |= linear_shapes(f"{block}.mlp.c_fc", width, inner) | linear_shapes(
                f"{block}.mlp.c_proj", inner, width
            )
    return draw_weights(shapes)


def blip_weights() -> dict[str, torch.Tensor]:
    """An ImageReward under its published names, with what BLIP has besides."""
    width = BLIP_WIDTH
    words = BERT_WIDTH
    places = (BLIP_SIZE // 16) ** 2 + 1
    eye = "blip.visual_encoder"
    read = "blip.text_encoder"
    shapes: dict[str, tuple[int, ...]] = {
        f"{eye}.cls_token": (1, 1, width),
        f"{eye}.pos_embed": (1, places, width),
        f"{eye}.patch_embed.proj.weight": (width, 3, 16, 16),
        f"{eye}.patch_embed.proj.bias": (width,),
        **norm_shapes(f"{eye}.norm", width),
        f"{read}.embeddings.word_embeddings.weight": (MED_CONFIG["vocab_size"], words),
        f"{read}.embeddings.position_embeddings.weight": (
            MED_CONFIG["max_position_embeddings"],
            words,
        ),
        **norm_shapes(f"{read}.embeddings.LayerNorm", words),
        **linear_shapes("blip.vision_proj", width, 16),
        **linear_shapes("blip.text_proj", words, 16),
    }
    for layer in range(2):
        block = f"{eye}.blocks.{layer}"
        shapes |= norm_shapes(f"{block}.norm1", width) | norm_shapes(f"{block}.norm2", width)
        shapes |= linear_shapes(f"{block}.attn.qkv", width, 3 * width) | linear_shapes(
            f"{block}.attn.proj", width, width
        )
        shapes |= linear_shapes(f"{block}.mlp.fc1", width, 4 * width) | linear_shapes(
            f"{block}.mlp.fc2", 4 * width, width
        )
        block = f"{read}.encoder.layer.{layer}"
        for part, source in (("attention", words), ("crossattention", width)):
            shapes |= linear_shapes(f"{block}.{part}.self.query", words, words)
            shapes |= linear_shapes(f"{block}.{part}.self.key", source, words) | linear_shapes(
                f"{block}.{part}.self.value", source, words
            )
            shapes |= linear_shapes(f"{block}.{part}.output.dense", words, words) | norm_shapes(
                f"{block}.{part}.output.LayerNorm", words
            )
        shapes |= linear_shapes(f"{block}.intermediate.dense", words, 80) | linear_shapes(
            f"{block}.output.dense", 80, words
        )
        shapes |= norm_shapes(f"{block}.output.LayerNorm", words)
    weights = draw_weights(shapes) | {
        f"mlp.{name}": tensor for name, tensor in head_weights(words).items()
    }
    return weights | {f"{read}.embeddings.position_ids": torch.arange(64)[None]}
