"""A tiny Qwen2-VL in the layouts of the rewards that are trained from it, HPSv3 and VideoAlign."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.tiny_models.tokenizers import build_qwen_tokenizer
from tests.rewards.weight_cases import draw_weights, linear_shapes, norm_shapes

QWEN_WIDTH = 32
QWEN_INNER = 48
QWEN_EYE = 24
QWEN_CONFIG = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": QWEN_WIDTH,
    "intermediate_size": QWEN_INNER,
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "model_type": "qwen2_vl",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 1,
        "embed_dim": QWEN_EYE,
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_chans": 3,
        "hidden_size": QWEN_WIDTH,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}
"""As Qwen2-VL-7B-Instruct says it, flat, but for the sizes, the ids of its special tokens and the
padded vocabulary.
"""
HPSV3_HEAD = {0: (20, QWEN_WIDTH), 3: (6, 20), 5: (2, 6)}


def write_qwen_processor(folder: Path) -> None:
    """Of the repository of a Qwen2-VL, what its rewards need."""
    tokenizer = build_qwen_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
    }
    ids |= {
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": "<|im_end|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    numbers = {key: tokenizer.convert_tokens_to_ids(token) for key, token in ids.items()}
    (folder / "config.json").write_text(
        json.dumps({**QWEN_CONFIG, **numbers, "vocab_size": len(tokenizer) + 11})
    )


def qwen_weights(
    tokens: tuple[str, ...], head: dict[int, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """A Qwen2-VL with some more tokens under the names that transformers had then, and a head of
    linear layers.
    """
    width = QWEN_WIDTH
    eye = QWEN_EYE
    words = len(build_qwen_tokenizer()) + len(tokens)
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (eye, 3, 2, 14, 14),
        **norm_shapes("visual.merger.ln_q", eye),
        **linear_shapes("visual.merger.mlp.0", 4 * eye, 4 * eye),
        **linear_shapes("visual.merger.mlp.2", 4 * eye, width),
        "model.embed_tokens.weight": (words, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (words, width),
    }
    block = "visual.blocks.0"
    shapes |= norm_shapes(f"{block}.norm1", eye) | norm_shapes(f"{block}.norm2", eye)
    shapes |= linear_shapes(f"{block}.attn.qkv", eye, 3 * eye) | linear_shapes(
        f"{block}.attn.proj", eye, eye
    )
    shapes |= linear_shapes(f"{block}.mlp.fc1", eye, 2 * eye) | linear_shapes(
        f"{block}.mlp.fc2", 2 * eye, eye
    )
    for block in (f"model.layers.{layer}" for layer in range(2)):
        shapes |= linear_shapes(f"{block}.self_attn.q_proj", width, width)
        shapes |= linear_shapes(f"{block}.self_attn.k_proj", width, width // 2) | linear_shapes(
            f"{block}.self_attn.v_proj", width, width // 2
        )
        shapes |= {
            f"{block}.self_attn.o_proj.weight": (width, width),
            f"{block}.mlp.down_proj.weight": (width, QWEN_INNER),
        }
        shapes |= {
            f"{block}.mlp.{part}_proj.weight": (QWEN_INNER, width) for part in ("gate", "up")
        }
        shapes |= {
            f"{block}.{part}_layernorm.weight": (width,) for part in ("input", "post_attention")
        }
    for number, size in head.items():
        shapes |= {f"rm_head.{number}.weight": size, f"rm_head.{number}.bias": size[:1]}
    return {
        name: weight.bfloat16().float() for name, weight in draw_weights(shapes).items()
    }  # as published: nothing to round


VIDEO_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
VIDEO_SETTINGS = {
    "data_config": {
        "max_frame_pixels": 6 * 28 * 28,
        "num_frames": None,
        "fps": 2.0,
        "eval_dim": ["VQ", "MQ", "TA"],
        "prompt_template_type": "detailed_special",
        "sample_type": "uniform",
    },
    "model_config": {"output_dim": 1, "use_special_tokens": True, "reward_token": "special"},
    "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False},
    "inference_config": {
        "VQ_mean": 3.6757,
        "VQ_std": 2.2476,
        "MQ_mean": 1.1646,
        "MQ_std": 1.3811,
        "TA_mean": 2.8105,
        "TA_std": 2.5121,
    },
}
"""Of ``model_config.json``, what is read, as published but for the pixels and the rank, which is 64
of 128.
"""


def lora_weights(base: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """An adapter of every linear layer of the language model, by the names of the layers."""
    layers = [
        name.removesuffix(".weight")
        for name in base
        if name.startswith("model.layers") and "_proj.weight" in name
    ]
    shapes = {
        f"{layer}.lora_A.default.weight": (rank, base[f"{layer}.weight"].shape[1])
        for layer in layers
    }
    return draw_weights(
        shapes
        | {
            f"{layer}.lora_B.default.weight": (base[f"{layer}.weight"].shape[0], rank)
            for layer in layers
        }
    )


def video_reward_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """(a Qwen2-VL with three more tokens, an adapter of it, a head with one output)."""
    base = qwen_weights(VIDEO_TOKENS, {})
    return base, lora_weights(base, 4), torch.linspace(-1, 1, QWEN_WIDTH)[None]


def write_video_reward(folder: Path) -> None:
    """A VideoReward as published: the state of a network that peft wrapped, and what it was trained
    with.
    """
    base, adapter, head = video_reward_weights()
    adapted = {name.partition(".lora_")[0] for name in adapter}
    state = {}
    for name, tensor in (base | adapter | {"rm_head.weight": head}).items():
        layer, _, part = name.rpartition(".")
        state[f"base_model.model.{f'{layer}.base_layer.{part}' if layer in adapted else name}"] = (
            tensor
        )
    (folder / "checkpoint-7").mkdir(parents=True)
    torch.save(state, folder / "checkpoint-7" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps(VIDEO_SETTINGS))
