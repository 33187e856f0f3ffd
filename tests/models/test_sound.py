"""The sound of LTX-2 against diffusers' pipeline: latents, spectrogram and waveform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pipeline_cases import SHORT, keys, our_latents, prompts, theirs

from ebbflow.flow.noise import generate_initial_noise
from ebbflow.models import predict


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_sound_of_a_sample_is_the_pipelines(tiny, peer, monkeypatch, guidance):
    model = tiny("ltx2", frames=9, guidance=guidance)
    pipeline = peer("ltx2")
    heard = []
    vocoder = pipeline.vocoder.forward
    monkeypatch.setattr(
        pipeline.vocoder, "forward", lambda mel: heard.append(vocoder(mel)) or heard[-1]
    )
    wanted = prompts("ltx2", SHORT[:2])
    ours = our_latents(model, wanted)
    theirs(pipeline, model, wanted)
    (expected,) = heard
    waves = model._decode_waves(ours)
    assert waves.shape == expected.shape
    assert expected.std() > 0.01
    assert (waves - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max())
    pcm = model.decode_sound(ours)
    assert (pcm.dtype, pcm.shape) == (np.int16, (2, expected.shape[2], 2))
    assert np.abs(pcm.swapaxes(1, 2) / 32767 - expected.numpy().clip(-1, 1)).max() < 2e-5


@torch.no_grad()
@pytest.mark.parametrize("changed", ["video", "sound"])
def test_video_and_sound_attend_to_each_other(tiny, changed):
    model = tiny("ltx2", frames=9)
    wanted = prompts("ltx2", SHORT[:1])
    conditioning = model.encode_prompts(wanted)
    shape = model.latent_shape
    latents = generate_initial_noise(shape, keys(wanted))
    sigma = torch.tensor([0.7])
    before = shape.split(predict(model, latents, sigma, conditioning))
    parts = shape.split(latents)
    moved = shape.join(parts | {changed: parts[changed].flip(-1)})
    after = shape.split(predict(model, moved, sigma, conditioning))
    (other,) = {"video", "sound"} - {changed}
    assert (after[other] - before[other]).abs().max() > 1e-2


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_model_in_16_bits_decodes_the_sound_of_one_in_32(tiny, open_tiny, precision):
    exact = tiny("ltx2", frames=9)
    latents = generate_initial_noise(exact.latent_shape, keys(prompts("ltx2", SHORT[:2])))
    expected = exact.decode_sound(latents).astype(int)
    pcm = open_tiny("ltx2", frames=9, precision=precision).decode_sound(latents)
    assert expected.std() > 0
    assert np.abs(pcm - expected).max() <= 1


def test_a_longer_video_has_a_longer_sound(tiny):
    shapes = [tiny("ltx2", frames=frames).latent_shape.parts for frames in (1, 25, 121)]
    # 25 latents of sound a second, at 24 frames a second.
    assert [shape["sound"][1] for shape in shapes] == [1, 26, 126]
    assert [shape["video"][1] for shape in shapes] == [1, 4, 16]
