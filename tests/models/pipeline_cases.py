"""The tiny folders, prompts for them, and what diffusers' own pipelines draw of these prompts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler
from PIL import Image
from torch import Tensor

from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys, noise
from ebbflow.models.pipeline import PipelineModel, pack, unpack
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate

TINY = ("sd3", "flux", "qwen_image", "qwen_image_edit", "wan", "wan21")
"""The tiny folders; the last two are versions 2.2 and 2.1 of Wan."""
SHORT = ('a sign that says "OPEN"', "two cats", "a red bicycle leans against a blue wall")
LONG = "a bowl of ripe fruit, 4 apples and 2 oranges, " * 80
"""More tokens than any of the pipelines reads, the one for editing apart."""
SEED = 5
EDITED_PIXELS = 64 * 64
"""Instead of 1024 x 1024, to which the pipeline for editing scales its images."""


class FirstOrderUniPC(UniPCMultistepScheduler):
    """The published scheduler of Wan with steps of first order, which are Euler's; neither 1e-6 below 1 nor truncated."""

    def set_timesteps(self, num_inference_steps: int, **rest: Any) -> None:
        super().set_timesteps(num_inference_steps, **rest)
        self.sigmas[0] = 1.0
        self.timesteps = 1000 * self.sigmas[:-1]


def family(name: str) -> str:
    return "wan" if name == "wan21" else name


def guidance(name: str) -> float:
    return 3.5 if name == "flux" else 4.0


def few_tokens(name: str) -> dict[str, int]:
    """A limit that makes prompts cheap, where the family has one."""
    return {} if name == "qwen_image_edit" else {"max_tokens": 32}


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of smooth colours."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def prompts(
    name: str, texts: Sequence[str] = SHORT, negatives: Sequence[str] = (), size: tuple[int, int] = (48, 48)
) -> list[Prompt]:
    """Prompts with ids from zero, a negative prompt each, and an image of ``size`` where the family edits one."""
    rows = zip(texts, negatives or [f"blurry {index}" for index in range(len(texts))], strict=True)
    return [
        Prompt(index, text, negative, None, "", "train", "{}", picture(*size, index) if name == "qwen_image_edit" else None)
        for index, (text, negative) in enumerate(rows)
    ]


def keys(wanted: Sequence[Prompt]) -> SampleKeys:
    return SampleKeys(SEED, [prompt.prompt_id for prompt in wanted], [0] * len(wanted))


def our_latents(model: PipelineModel, wanted: Sequence[Prompt], steps: int = 3) -> Tensor:
    return generate(model, model.encode(wanted), keys(wanted), SamplerConfig(name="ode", steps=steps)).latents


def theirs(
    pipeline: DiffusionPipeline, model: PipelineModel, wanted: Sequence[Prompt], steps: int = 3
) -> tuple[Tensor, np.ndarray]:
    """What the pipeline makes of the same noise and prompts at the size and guidance of our model.

    Returns:
        Latents, [N, *latent_shape], and pixels in the shape of ours, 0 to 255 and not rounded.
    """
    noises = noise(model.latent_shape, SEED, [prompt.prompt_id for prompt in wanted], [0] * len(wanted))
    # The pipeline for editing takes one image at a time: it scales a list of them for the network and not for the text encoder.
    size = 1 if model.config.family == "qwen_image_edit" else len(wanted)
    parts = [slice(start, start + size) for start in range(0, len(wanted), size)]
    drawn = [_draw(pipeline, model, wanted[part], noises[part], steps) for part in parts]
    latents, images = torch.cat([latents for latents, _ in drawn]), 255 * np.concatenate([images for _, images in drawn])
    one_frame = images.ndim == 5 and model.config.frames == 1
    return unpack(latents, model.latent_shape) if _packs(model) else latents, images[:, 0] if one_frame else images


def _packs(model: PipelineModel) -> bool:
    return model.config.family in ("flux", "qwen_image", "qwen_image_edit")


def _draw(
    pipeline: DiffusionPipeline, model: PipelineModel, wanted: Sequence[Prompt], noises: Tensor, steps: int
) -> tuple[Tensor, np.ndarray]:
    """The latents after the last step, in the pipeline's own layout, and the pixels, in [0, 1]."""
    seen = []

    def watch(pipeline: DiffusionPipeline, step: int, time: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(values["latents"])
        return values

    images = pipeline(
        height=model.height,
        width=model.width,
        num_inference_steps=steps,
        callback_on_step_end=watch,
        output_type="np",
        return_dict=False,
        **_asked(model, wanted, noises),
    )[0]
    return seen[-1], images


def _asked(model: PipelineModel, wanted: Sequence[Prompt], noises: Tensor) -> dict[str, Any]:
    """What the families' pipelines call the noise, the prompts and the guidance."""
    kind, guidance = model.config.family, model.config.guidance
    asked: dict[str, Any] = {"prompt": [prompt.prompt for prompt in wanted]}
    asked["latents"] = pack(noises) if _packs(model) else noises
    if kind.startswith("qwen"):
        asked["true_cfg_scale"] = guidance
    else:
        asked["guidance_scale"] = guidance
    if kind != "flux":
        asked["negative_prompt"] = [prompt.negative_prompt for prompt in wanted]
    if kind == "wan":
        asked["num_frames"] = model.config.frames
    if kind == "qwen_image_edit":
        asked["image"] = Image.open(io.BytesIO(wanted[0].image or b""))
    return asked
