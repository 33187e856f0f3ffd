"""The sound of LTX-2 and LTX-2.3 against diffusers' pipeline: latents, spectrogram and waveform."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
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


@pytest.fixture(scope="module")
def later_folder(tiny_folder, tmp_path_factory):
    """A folder of the layout of LTX-2.3: gates of attention, text that is modulated by the time and
    projected for each latent, and a vocoder that widens the band.
    """
    folder = tmp_path_factory.mktemp("later") / "ltx23"
    parts = ("transformer", "connectors", "vocoder")
    shutil.copytree(tiny_folder("ltx2"), folder, ignore=shutil.ignore_patterns(*parts))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = LTX2VideoTransformer3DModel.load_config(tiny_folder("ltx2") / "transformer")
        LTX2VideoTransformer3DModel.from_config(
            transformer,
            use_prompt_embeddings=False,
            perturbed_attn=True,
            **dict.fromkeys(("gated_attn", "cross_attn_mod"), True),
            **dict.fromkeys(("audio_gated_attn", "audio_cross_attn_mod"), True),
        ).save_pretrained(folder / "transformer")
        connectors = LTX2TextConnectors.load_config(tiny_folder("ltx2") / "connectors")
        LTX2TextConnectors.from_config(
            connectors,
            per_modality_projections=True,
            video_gated_attn=True,
            audio_gated_attn=True,
            video_hidden_dim=32,
            audio_hidden_dim=16,
            audio_connector_attention_head_dim=8,
            proj_bias=True,
        ).save_pretrained(folder / "connectors")
        # Spectrograms of 2 channels and 16 bands; 4 samples for each point in time, 3 times as many
        # from the wider band.
        LTX2VocoderWithBWE(
            in_channels=2 * 16,
            hidden_channels=16,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
            bwe_in_channels=2 * 8,
            bwe_hidden_channels=16,
            bwe_upsample_kernel_sizes=[12, 4],
            bwe_upsample_factors=[6, 2],
            bwe_resnet_kernel_sizes=[3],
            bwe_resnet_dilations=[[1, 3]],
            filter_length=16,
            hop_length=4,
            window_length=16,
            num_mel_channels=8,
        ).save_pretrained(folder / "vocoder")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"LTX2Vocoder"', '"LTX2VocoderWithBWE"'))
    return folder


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_ltx_2_3_with_its_sound_is_the_pipeline(
    later_folder, open_tiny, open_peer, monkeypatch, guidance
):
    model = open_tiny("ltx2", later_folder, frames=9, guidance=guidance)
    pipeline = open_peer("ltx2", later_folder)
    heard = []
    vocoder = pipeline.vocoder.forward
    monkeypatch.setattr(
        pipeline.vocoder, "forward", lambda mel: heard.append(vocoder(mel)) or heard[-1]
    )
    wanted = prompts("ltx2", SHORT[:2])
    ours = our_latents(model, wanted)
    latents, images = theirs(pipeline, model, wanted)
    assert (ours - latents).abs().max() < 1e-5 * ours.abs().max()
    assert np.abs(model.decode_latents(ours) - images).max() < 1
    (expected,) = heard
    assert (model._decode_waves(ours) - expected).abs().max() < 1e-5 * max(
        1.0, expected.abs().max()
    )
    # Not as LTX-2: its time reaches what the blocks attend to.
    assert model.transformer.prompt_modulation


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
