"""The tiny folders, prompts for them, and what diffusers' own pipelines draw of these prompts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, UniPCMultistepScheduler
from PIL import Image
from torch import Tensor

from ebbflow.data.images import split_condition_images
from ebbflow.data.prompts import Prompt
from ebbflow.flow.latents import NamedLatents
from ebbflow.flow.noise import SampleKeys, generate_noise
from ebbflow.models.families import load_adapter
from ebbflow.models.packed import PackedPipelineModel, pack_latents, unpack_tokens
from ebbflow.models.pipeline import PipelineModel
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.families import FAMILIES
from ebbflow.rollouts.generate import generate_samples

TINY = ("sd3", "flux", "qwen_image", "qwen_image_edit", "wan", "wan21")
"""The tiny folders that all tests of the families run on; the last two are versions 2.2 and 2.1 of
Wan.
"""
EDITING = ("flux_kontext", "flux2_edit", "qwen_image_edit_plus")
VIDEOS = (
    *("wan_a14b", "wan_i2v", "hunyuan_video", "ltx_video", "ltx2", "hunyuan_video_15"),
    "wan_flf2v",
)
NEWER = (
    *("z_image", "flux2_klein", "sana", "flux2", "lumina2", *EDITING, *VIDEOS, "flux3"),
    "qwen_image_21",
)
"""Families that differ less from those of ``TINY``. Most tests run on them in ``make test-all``
only.
"""
EVERY = (*TINY, *NEWER)
NEWER_FAMILIES_IN_TEST_ALL = [
    *TINY,
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NEWER),
]
"""All families, the newer ones in ``make test-all`` only."""
NEWEST = (
    *("sana", "flux2", "flux2_edit", "lumina2", "hunyuan_video", "ltx_video", "ltx2"),
    *("hunyuan_video_15", "flux3", "wan_flf2v", "qwen_image_21"),
)
"""Families of which ``make test`` only shows that they generate the image of their pipeline, and
for three (``OUR_LORA``) that the pipeline loads our adapters.
"""
NEWEST_FAMILIES_IN_TEST_ALL = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in NEWEST else name for name in EVERY
]
OUR_LORA = ("sana", "flux2", "ltx2")
SIMILAR_FAMILIES_IN_TEST_ALL = [
    pytest.param(name, marks=pytest.mark.exhaustive)
    if name in NEWEST and name not in OUR_LORA
    else name
    for name in EVERY
]
SHORT = ('a sign that says "OPEN"', "two cats", "a red bicycle leans against a blue wall")
LONG = "a bowl of ripe fruit, 4 apples and 2 oranges, " * 80
"""More tokens than any of the pipelines reads, the one for editing apart."""
MODULAR = ("flux3",)
"""Whose pipelines are modular."""
COARSE = ("sana", "wan", "ltx_video", "ltx2", "qwen_image_21")
"""Whose sizes are multiples of 32."""
FIRST_AND_LAST = ("wan_flf2v",)
"""Which draw videos between two images, and no single frame."""
WITHOUT_CALLBACK = ("hunyuan_video_15", "flux3")
"""Whose pipelines call nothing after a step."""
ALONE = (*WITHOUT_CALLBACK, "qwen_image_21")
"""Whose pipelines get one prompt at a time: FLUX.3's takes one, the VAE of HunyuanVideo-1.5 decodes
one, and Qwen-Image-2.1's pads a batch to the longest prompt, which moves the positions of images.
"""
PLAIN_GUIDANCE = {
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}
"""Of LTX-2's pipeline: away from the negative prompt alone."""
SEED = 5
EDITED_PIXELS = 64 * 64
"""Instead of 1024 x 1024, to which the pipelines for editing scale their images."""
FEW_TOKENS = 32
"""A limit that makes prompts cheap."""
PADDED = ("hunyuan_video_15",)
"""Whose pipelines pad all texts to their limits: at those that are published, padding would be most
of what the tiny models compute.
"""


class FirstOrderUniPC(UniPCMultistepScheduler):
    """The published scheduler of Wan with steps of first order, which are Euler's; neither 1e-6
    below 1 nor truncated.
    """

    def set_timesteps(self, num_inference_steps: int, **rest: Any) -> None:
        super().set_timesteps(num_inference_steps, **rest)
        self.sigmas[0] = 1.0
        self.timesteps = 1000 * self.sigmas[:-1]


class UnroundedUniPC(UniPCMultistepScheduler):
    """The published scheduler of Wan with times as they are."""

    def set_timesteps(self, num_inference_steps: int, **rest: Any) -> None:
        super().set_timesteps(num_inference_steps, **rest)
        self.timesteps = 1000 * torch.where(self.sigmas > 1 - 1e-5, 1.0, self.sigmas)[:-1]


class FirstOrderDpmSolver(DPMSolverMultistepScheduler):
    """The same of SANA's."""

    def set_timesteps(self, num_inference_steps: int, **rest: Any) -> None:
        super().set_timesteps(num_inference_steps, **rest)
        self.sigmas[0] = 1.0
        self.timesteps = 1000 * self.sigmas[:-1]


def family(name: str) -> str:
    return "wan" if name == "wan21" else name


def guided(name: str) -> bool:
    """By negative prompts."""
    return FAMILIES[family(name)].guided


def edits(name: str) -> bool:
    return FAMILIES[family(name)].edits_images


def draws_videos(name: str) -> bool:
    return load_adapter(family(name)).draws_videos


def guidance(name: str) -> float:
    return 4.0 if guided(name) else 3.5


def needs_torchvision(name: str) -> bool:
    """Whether diffusers needs it to load the family's folders, for a processor of which Ebbflow
    needs less.
    """
    others = ("flux2", "flux3", "qwen_image_21")
    return name.startswith(("qwen_image_edit", "flux2_edit")) or name in others


def has_limit(name: str) -> bool:
    """Whether the family takes ``max_tokens``."""
    return not name.startswith(("qwen_image_edit", "qwen_image_21"))


def few_tokens(name: str) -> dict[str, int]:
    """A limit that makes prompts cheap, where the family has one."""
    return {"max_tokens": FEW_TOKENS} if has_limit(name) else {}


def pad_to_few_tokens(pipeline: DiffusionPipeline) -> None:
    """Have a pipeline of ``PADDED`` pad to few tokens: its text, the quotes in it, and an image
    that is not there.
    """
    pipeline.tokenizer_max_length = pipeline.tokenizer_2_max_length = FEW_TOKENS
    pipeline.vision_num_semantic_tokens = 1


@cache
def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of smooth colours."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def prompts(
    name: str,
    texts: Sequence[str] = SHORT,
    negatives: Sequence[str] = (),
    size: tuple[int, int] = (64, 64),
    further: Sequence[tuple[int, int]] = (),
) -> list[Prompt]:
    """Prompts with ids from zero, a negative prompt each, and an image of ``size`` where the family
    edits one, with more of the sizes of ``further``.

    The pipeline of FLUX.2 has no negative prompts but the empty one.
    """
    blurry = ["" if name == "flux2_klein" else f"blurry {index}" for index in range(len(texts))]
    if name in FIRST_AND_LAST:
        further = [(96, 64)]
    rows = zip(texts, negatives or blurry, strict=True)
    return [
        Prompt(
            index,
            text,
            negative,
            None,
            "",
            "train",
            "{}",
            b"".join(picture(*edges, index) for edges in (size, *further)) if edits(name) else None,
        )
        for index, (text, negative) in enumerate(rows)
    ]


def keys(wanted: Sequence[Prompt]) -> SampleKeys:
    return SampleKeys(SEED, [prompt.prompt_id for prompt in wanted], [0] * len(wanted))


def our_latents(model: PipelineModel, wanted: Sequence[Prompt], steps: int = 3) -> Tensor:
    return generate_samples(
        model, model.encode_prompts(wanted), keys(wanted), SamplerConfig(name="ode", steps=steps)
    ).latents


def theirs(
    pipeline: DiffusionPipeline, model: PipelineModel, wanted: Sequence[Prompt], steps: int = 3
) -> tuple[Tensor, np.ndarray]:
    """What the pipeline makes of the same noise and prompts at the size and guidance of our model.

    Returns:
        Latents, [N, *latent_shape], and pixels in the shape of ours, 0 to 255 and not rounded.
    """
    drawn = _draw_all(pipeline, model, wanted, steps, "np")
    latents = torch.cat([latents for latents, _ in drawn])
    images = 255 * np.concatenate([_on_white(images) for _, images in drawn])
    one_frame = images.ndim == 5 and model.config.frames == 1
    return _unpack(model, latents), images[:, 0] if one_frame else images


def their_latents(
    pipeline: DiffusionPipeline, model: PipelineModel, wanted: Sequence[Prompt], steps: int = 3
) -> Tensor:
    """The latents of ``theirs`` alone, which are not decoded."""
    drawn = _draw_all(pipeline, model, wanted, steps, "latent")
    return _unpack(model, torch.cat([latents for latents, _ in drawn]))


def _draw_all(
    pipeline: DiffusionPipeline,
    model: PipelineModel,
    wanted: Sequence[Prompt],
    steps: int,
    output_type: str,
) -> list[tuple[Tensor, np.ndarray]]:
    noises = generate_noise(
        model.latent_shape, SEED, [prompt.prompt_id for prompt in wanted], [0] * len(wanted)
    )
    # An image for all prompts is what the pipelines for editing take.
    alone = edits(model.config.family) or model.config.family in ALONE
    size = 1 if alone else len(wanted)
    parts = [slice(start, start + size) for start in range(0, len(wanted), size)]
    return [
        _draw(pipeline, model, wanted[part], noises[part], steps, output_type) for part in parts
    ]


def _on_white(images: np.ndarray) -> np.ndarray:
    """Images of three channels; those with an alpha channel, as a white page shows them."""
    if images.shape[-1] == 3:
        return images
    colors, alpha = images[..., :3], images[..., 3:]
    return colors * alpha + (1 - alpha)


def _unpack(model: PipelineModel, latents: Tensor) -> Tensor:
    """Latents in the pipeline's layout, in ours: [N, *latent_shape]."""
    if model.config.family in ("ltx_video", "qwen_image_21", *MODULAR):
        return latents.mT.reshape(-1, *model.latent_shape)
    return unpack_tokens(latents, model.latent_shape) if _packs(model) else latents


def _packs(model: PipelineModel) -> bool:
    return isinstance(model, PackedPipelineModel)


def _draw(
    pipeline: DiffusionPipeline,
    model: PipelineModel,
    wanted: Sequence[Prompt],
    noises: Tensor,
    steps: int,
    output_type: str,
) -> tuple[Tensor, np.ndarray]:
    """The latents after the last step, in the pipeline's own layout, and the pixels, in [0, 1]."""
    seen = []
    names = ["latents"]
    if model.config.family == "ltx2":
        # The pipeline has the sound's latents, and a list that keeps them from callbacks.
        names.append("audio_latents")
        pipeline._callback_tensor_inputs = names

    def watch(
        pipeline: DiffusionPipeline, step: int, time: Tensor, values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        seen.append({name: values[name] for name in names})
        return values

    take_step = pipeline.scheduler.step

    def remember_step(*args: Any, **kwargs: Any) -> Any:
        stepped = take_step(*args, **kwargs)
        seen.append({"latents": stepped[0]})
        return stepped

    asked = _asked(pipeline, model, wanted, noises)
    watching: AbstractContextManager[Any] = nullcontext()
    if model.config.family in WITHOUT_CALLBACK:
        watching = patch.object(pipeline.scheduler, "step", remember_step)
        # Its pipeline takes the scale from the folder.
        pipeline.guider.guidance_scale = asked.pop("guidance_scale")
    else:
        asked["callback_on_step_end"] = watch
        asked["callback_on_step_end_tensor_inputs"] = names
    if model.config.family in MODULAR:
        asked |= {
            "output": ["images"],
            "prompt": asked["prompt"][0],
            "negative_prompt": asked["negative_prompt"][0],
        }
    else:
        asked["return_dict"] = False
    with watching:
        outputs = pipeline(
            height=model.height,
            width=model.width,
            num_inference_steps=steps,
            output_type=output_type,
            **asked,
        )
    images = outputs["images"] if model.config.family in MODULAR else outputs[0]
    last = seen[-1]
    if model.config.family == "ltx2":
        return _join_ltx2(model, last["latents"], last["audio_latents"]), images
    return last["latents"], images


def _join_ltx2(model: PipelineModel, video: Tensor, sound: Tensor) -> Tensor:
    """Rows of ours, of the tokens of the pipeline."""
    shape = model.latent_shape
    assert isinstance(shape, NamedLatents)
    shapes = shape.parts
    bands = shapes["sound"][2]
    return shape.join(
        {
            "video": video.mT.reshape(-1, *shapes["video"]),
            "sound": sound.unflatten(2, (-1, bands)).transpose(1, 2),
        }
    )


def _ask_ltx2(pipeline: DiffusionPipeline, model: PipelineModel, noises: Tensor) -> dict[str, Any]:
    """Noise of video and sound. The pipeline takes sound to be clean, and scales it."""
    shape = model.latent_shape
    assert isinstance(shape, NamedLatents)
    noise = shape.split(noises)
    sound = noise["sound"].transpose(1, 2).flatten(2)
    vae = pipeline.audio_vae
    return {
        "audio_guidance_scale": model.config.guidance,
        "latents": noise["video"].flatten(2).mT,
        "audio_latents": sound * vae.latents_std + vae.latents_mean,
    }


def _asked(
    pipeline: DiffusionPipeline, model: PipelineModel, wanted: Sequence[Prompt], noises: Tensor
) -> dict[str, Any]:
    """What the families' pipelines call the noise, the prompts and the guidance."""
    kind = model.config.family
    guidance = model.config.guidance
    asked: dict[str, Any] = {"prompt": [prompt.prompt for prompt in wanted]}
    asked["latents"] = pack_latents(noises) if _packs(model) else noises
    if kind.startswith("qwen"):
        asked["true_cfg_scale"] = guidance
    else:
        asked["guidance_scale"] = guidance - 1 if kind == "z_image" else guidance
    if guided(kind) and kind != "flux2_klein":
        asked["negative_prompt"] = [prompt.negative_prompt for prompt in wanted]
    if model.config.guidance_2 is not None:
        asked["guidance_scale_2"] = model.config.guidance_2
    if draws_videos(kind):
        asked["num_frames"] = model.config.frames
    if kind in ("ltx_video", "qwen_image_21"):
        asked["latents"] = noises.flatten(2).mT
    if kind == "ltx2":
        asked |= PLAIN_GUIDANCE | _ask_ltx2(pipeline, model, noises)
    if kind == "sana":
        asked["use_resolution_binning"] = False
    if kind.startswith("flux2"):  # packs by itself, from latents whose channels are the patches'
        _, height, width = model.latent_shape
        asked["latents"] = asked["latents"].mT.unflatten(-1, (height // 2, width // 2))
    if kind == "flux_kontext":
        asked["max_area"] = model.height * model.width
    if edits(kind):
        files = split_condition_images(wanted[0].image or b"")
        images = [Image.open(io.BytesIO(file)) for file in files]
        if kind in FIRST_AND_LAST:
            asked["image"], asked["last_image"] = images
        else:
            asked["image"] = images if len(images) > 1 else images[0]
    return asked
