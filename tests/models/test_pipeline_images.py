"""Images to latents and back, as diffusers' pipelines encode and decode them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pipeline_cases import FIRST_AND_LAST, NEWER_FAMILIES_IN_TEST_ALL, TINY, draws_videos
from torch import nn

from ebbflow.models import ModelError

IMAGES = (
    "sd3",
    "flux",
    "flux_kontext",
    "flux2",
    "flux2_edit",
    "flux2_klein",
    "z_image",
    "sana",
    "lumina2",
    "flux3",
)
"""Whose VAE is none of videos."""


def test_rewards_see_transparent_images_on_white(tiny, monkeypatch):
    model = tiny("qwen_image_21")
    # Half transparent red: [1, 4, 1, H, W], of -1 to 1.
    pixels = torch.tensor([1.0, -1, -1, 0]).view(1, 4, 1, 1, 1).expand(-1, -1, -1, 64, 64)
    monkeypatch.setattr(model.pipeline.vae, "decode", lambda latents, return_dict: (pixels,))
    image = model.decode_latents(torch.zeros(1, *model.latent_shape))
    assert image.shape == (1, 64, 64, 3)
    assert (image == [255, 128, 128]).all()


def shift_and_scale(name, vae):
    """What the pipelines subtract from the VAE's latents, and multiply them with."""
    if name == "flux3":  # of a token of 2 x 2 latents, here as those of the VAE
        name = "flux2"
    if name.startswith("flux2"):  # of each of the four elements of a patch, here of 8 x 8 latents
        mean, variance = (
            values.view(-1, 2, 2).repeat(1, 4, 4)
            for values in (vae.bn.running_mean, vae.bn.running_var)
        )
        return mean, (variance + vae.config.batch_norm_eps) ** -0.5
    if name == "ltx_video":
        return vae.latents_mean.view(-1, 1, 1, 1), 1 / vae.latents_std.view(-1, 1, 1, 1)
    if name in ("sana", "hunyuan_video", "hunyuan_video_15"):
        return 0, vae.config.scaling_factor
    if name in IMAGES:
        return vae.config.shift_factor, vae.config.scaling_factor
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, 1 / std


@pytest.mark.parametrize("frames", [1, 9])
@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_images_are_encoded_as_the_pipelines_encode_them(tiny, name, frames):
    if frames > 1 and not draws_videos(name):
        with pytest.raises(
            ModelError, match=f"model.frames = 9: {name} draws images; leave it out"
        ):
            tiny(name, frames=frames)
        return
    if frames == 1 and name in FIRST_AND_LAST:
        with pytest.raises(ModelError, match="frames = 1: wan_flf2v draws a video between a first"):
            tiny(name, frames=frames)
        return
    model = tiny(name, frames=frames)
    shape = (3, 64, 64, 3) if frames == 1 else (3, frames, 64, 64, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    if name == "ltx2":
        with pytest.raises(ModelError, match="ltx2 has a sound with every video, and pictures"):
            model.encode_images(images)
        return
    vae = model.pipeline.vae
    pixels = torch.from_numpy(images).movedim(-1, 1) / 127.5 - 1
    pixels = pixels[:, :, None] if frames == 1 and name not in IMAGES else pixels
    if name == "qwen_image_21":  # opaque
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
    with torch.no_grad():
        shift, scale = shift_and_scale(name, vae)
        outputs = [vae.encode(row) for row in pixels.split(1)]
        latents = torch.cat(
            [row.latent if name == "sana" else row.latent_dist.mode() for row in outputs]
        )
        expected = (latents - shift) * scale
        if name == "flux3":
            expected = nn.functional.pixel_unshuffle(expected, 2)
        expected = expected.view(3, *model.latent_shape)
    encoded = model.encode_images(images)
    assert encoded.dtype == torch.float32
    assert (encoded - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "frames"), [*((name, 1) for name in TINY), ("wan", 5), ("flux2_klein", 1)]
)
def test_encoding_undoes_decoding_but_for_the_vae(tiny, monkeypatch, name, frames):
    """A VAE that decodes into what it encodes: what is left are shift, scale and shape."""
    model = tiny(name, frames=frames, height=32)
    seen = []
    decode = model.pipeline.vae.decode

    def remember(latents, return_dict):
        seen.append(latents)
        return decode(latents, return_dict=return_dict)

    monkeypatch.setattr(model.pipeline.vae, "decode", remember)
    monkeypatch.setattr(
        model.pipeline.vae,
        "encode",
        lambda pixels: SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: seen[0])),
    )
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    assert (model.encode_images(model.decode_latents(latents)) - latents).abs().max() < 1e-5


def test_many_images_pass_the_vae_in_parts(tiny, monkeypatch):
    model = tiny("sd3")
    latents = torch.randn(5, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    whole = model.decode_latents(latents)
    encoded = model.encode_images(model.decode_latents(latents))
    monkeypatch.setattr("ebbflow.models.pipeline.PIXELS_AT_ONCE", 2 * 64 * 64)
    assert np.abs(model.decode_latents(latents).astype(int) - whole).max() <= 1
    assert (model.encode_images(whole) - encoded).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(1, 64, 48, 3), (1, 5, 64, 64, 3), (1, 64, 64, 4)])
def test_images_of_another_size_are_refused_with_both_sizes_by_pipelines(tiny, shape):
    with pytest.raises(
        ModelError, match=rf"{', '.join(map(str, shape[1:]))}.*\(64, 64, 3\); resize"
    ):
        tiny("sd3").encode_images(np.zeros(shape, np.uint8))
