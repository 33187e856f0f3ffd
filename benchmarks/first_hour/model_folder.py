"""A base-model folder of SD3's family with random weights, in the size of Stable Diffusion 3.5
medium with its T5, or tiny.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

from benchmarks.gpu_sides import SIZES
from benchmarks.tiny_models import build_tiny
from benchmarks.tiny_models.parts import build_clip
from benchmarks.tiny_models.tokenizers import build_clip_tokenizer, build_t5_tokenizer
from ebbflow.models.base import default_device
from ebbflow.recipe.model import ModelConfig

T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
CLIP_WIDTHS = (768, 1280)
DONE = "model_index.json"


def find_model_folder(folder: Path, size: str) -> Path:
    """Return the model folder of a size, written at its first use: 15 GB of medium."""
    path = folder / f"model-{size}"
    if not (path / DONE).exists():
        shutil.rmtree(path, ignore_errors=True)  # what a killed part has left
        unfinished = path.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        if size == "tiny":
            build_tiny("sd3", unfinished)
        else:
            write_medium(unfinished)
        unfinished.rename(path)
    return path


def write_medium(path: Path) -> None:
    """Write the published sizes in bfloat16; drawn on the device, as a CPU is slow to draw."""
    torch.manual_seed(0)
    size = SIZES["medium"]
    tokenizers = [build_clip_tokenizer(), build_clip_tokenizer(pad="!"), build_t5_tokenizer()]
    clips = [
        build_clip(CLIPTextModelWithProjection, tokenizer, width=width, activation="gelu")
        for tokenizer, width in zip(tokenizers[:2], CLIP_WIDTHS, strict=True)
    ]
    with torch.device(default_device()):
        t5 = T5EncoderModel(T5Config(vocab_size=len(tokenizers[2]), **T5_XXL))
        transformer = SD3Transformer2DModel(**size.transformer)
        vae = AutoencoderKL(**size.vae)
    encoders = [*clips, t5]
    pipeline = StableDiffusion3Pipeline(
        transformer.bfloat16(),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae.bfloat16(),
        *(
            part
            for encoder, tokenizer in zip(encoders, tokenizers, strict=True)
            for part in (encoder.bfloat16(), tokenizer)
        ),
    )
    pipeline.save_pretrained(path, max_shard_size="5GB")


def describe_model(path: Path, size: str) -> ModelConfig:
    """Return the recipe's model of such a folder."""
    side = SIZES[size].resolution
    return ModelConfig(
        family="sd3",
        path=str(path),
        precision="bfloat16",
        guidance=4.5,
        height=side,
        width=side,
    )
