"""Every family against diffusers' pipeline at 200 aspect ratios: the sizes of latents, conditioning
images and pixels, the positions of tokens, and what is refused.

Two steps of a tiny network are enough: a token in a wrong place, or an image of another size, gives
another prediction. ``test_families_fuzzed.py`` varies all else, in whole runs at fewer points.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from diffusers import AutoencoderKLWan
from pipeline_cases import (
    COARSE,
    FEW_TOKENS,
    MODULAR,
    edits,
    few_tokens,
    keys,
    prompts,
    their_latents,
    theirs,
)

from benchmarks.tiny_models import TINY
from ebbflow.models import ModelError
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate_samples

COUNT = 200
"""Aspect ratios of each family."""
DECODED = 40
"""Of so many ratios one is decoded, too, and its images are encoded by the VAE of a video: five,
each of more tokens than the one before.
"""
MOST = 7
"""The longer edge over the shorter one. FLUX.2 refuses images to edit beyond 8, and Qwen-Image-Edit
would scale them to nothing at the few pixels that it scales to here.
"""


def list_ratios() -> list[tuple[int, int]]:
    """Height and width in tokens, 2 or more: the smallest of each of the first aspect ratios."""
    sides = range(2, 41)
    pairs = sorted(
        ((height, width) for height in sides for width in sides),
        key=lambda pair: (math.prod(pair), pair),
    )
    smallest: dict[float, tuple[int, int]] = {}
    for height, width in pairs:
        # Of equal fractions the quotients are equal, to the bit.
        if max(height, width) <= MOST * min(height, width):
            smallest.setdefault(height / width, (height, width))
    return list(smallest.values())[:COUNT]


RATIOS = list_ratios()


def test_the_ratios_are_different_and_as_many_as_they_say():
    assert len({height / width for height, width in RATIOS}) == len(RATIOS) == COUNT
    assert {(3, 4), (16, 9), (9, 16), (2, 2), (14, 2)} <= set(RATIOS)


def shorten_text(pipeline, patch):
    """Have a pipeline read few tokens, and encode its prompt in the first call alone: text has no
    aspect ratio. Encoders that see images encode them all.
    """
    encode = pipeline.encode_prompt
    parameters = inspect.signature(encode).parameters
    if "image" in parameters:
        return
    if "max_sequence_length" not in parameters:
        patch.setattr(pipeline, "tokenizer_max_length", FEW_TOKENS)
    encoded = []

    def look_up(*args, **kwargs):
        if not encoded:
            if "max_sequence_length" in parameters:
                kwargs["max_sequence_length"] = FEW_TOKENS
            encoded.append(encode(*args, **kwargs))
        return encoded[0]

    patch.setattr(pipeline, "encode_prompt", look_up)


def encode_text_once(owner, function, patch):
    """Have a function of the text, which is the same at all ratios, run in the first call alone."""
    encode = getattr(owner, function)
    encoded = []

    def look_up(*args, **kwargs):
        if not encoded:
            encoded.append(encode(*args, **kwargs))
        return encoded[0]

    patch.setattr(owner, function, look_up)


def decode_nothing(*_, **__):
    """Stand in for the decoder of a pipeline that decodes what nobody looks at."""
    return (torch.zeros(1, 3, 8, 8),)


def pool_pixels(vae: AutoencoderKLWan, video: torch.Tensor) -> SimpleNamespace:
    """Stand in for the encoder of a video, [1, 3, frames, H, W], in a hundredth of its time: means
    of the pixels under each latent, which see a pixel in another place as well.
    """
    config = vae.config
    side = config.scale_factor_spatial
    frames = video[:, :, :: config.scale_factor_temporal]
    means = torch.nn.functional.avg_pool3d(frames, (1, side, side))
    # [1, z_dim, latent frames, h, w]: the three colours again and again.
    latents = means.repeat(1, math.ceil(config.z_dim / 3), 1, 1, 1)[:, : config.z_dim]
    return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))


def pool_pixels_of(*vaes: object) -> ExitStack:
    """Have those of the VAEs that encode videos pool their pixels, inside the block."""
    patches = ExitStack()
    for vae in vaes:
        if isinstance(vae, AutoencoderKLWan):
            patches.enter_context(patch.object(vae, "encode", partial(pool_pixels, vae)))
    return patches


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TINY)
def test_every_aspect_ratio_is_the_pipelines(tiny, peer, monkeypatch, name):
    pipeline = peer(name)
    config = {"guidance": 1.0}
    if name in MODULAR:
        # Its blocks all see the same prompt.
        encode_text_once(pipeline.text_encoder, "forward", monkeypatch)
    else:
        shorten_text(pipeline, monkeypatch)
        config |= few_tokens(name)
        # Pipelines search all their modules for offloaded ones each time that they ask for it.
        monkeypatch.setattr(type(pipeline), "_execution_device", torch.device("cpu"))
    if edits(name) and hasattr(tiny(name), "_encode_texts"):
        # Each image is encoded; in these families the text without it.
        encode_text_once(type(tiny(name)), "_encode_texts", monkeypatch)
    step = 32 if name in COARSE else 16
    conditioning = None
    passed = 0
    for index, (rows, columns) in enumerate(RATIOS):
        model = tiny(name, height=step * rows, width=step * columns, **config)
        # Images have all of these ratios too, each with another one of the picture; their shorter
        # edge is 65 pixels or a little more, as FLUX.2 refuses smaller ones than 64.
        shape = RATIOS[index - COUNT // 3]
        size = tuple(edge * math.ceil(65 / min(shape)) for edge in reversed(shape))
        wanted = prompts(name, ["a red sign"], [""], size)
        case = f"{name}, {model.height} x {model.width} pixels, image of {size}"
        is_decoded = index % DECODED == 0
        # Most of the time goes into VAEs, for which a size is a number of latents.
        vaes = () if is_decoded else (pipeline.vae, model.pipeline.vae)
        with pool_pixels_of(*vaes) as patches:
            if name in MODULAR and not is_decoded:
                patches.enter_context(patch.object(pipeline.vae, "decode", decode_nothing))
            if conditioning is None or edits(name):
                conditioning = model.encode_prompts(wanted)
            ours = generate_samples(
                model, conditioning, keys(wanted), SamplerConfig(name="ode", steps=2)
            ).latents
            if not is_decoded:
                latents = their_latents(pipeline, model, wanted, steps=2)
        if is_decoded:
            latents, images = theirs(pipeline, model, wanted, steps=2)
            decoded = model.decode_latents(ours)
            assert decoded.shape == images.shape, case
            assert decoded.shape[-3:] == (model.height, model.width, 3), case
            assert abs(decoded - images).max() < 1, case
        assert ours.shape == latents.shape, case
        assert (ours - latents).abs().max() < 2e-5 * ours.abs().max(), case
        with pytest.raises(ModelError, match=f"take ({model.height}|{model.height + step})$"):
            tiny(name, height=model.height + step // 2, width=model.width, **config)
        passed += 1
    assert passed == COUNT
