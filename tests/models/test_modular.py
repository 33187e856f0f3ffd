"""Families of modular pipelines: what is read from a folder, what is refused, what is estimated."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from pipeline_cases import prompts

from ebbflow.models import ModelError, predict
from ebbflow.models.sizes import measure_model
from ebbflow.recipe.base_folder import MODULAR_INDEX


def test_parts_are_read_from_the_folder_whatever_repository_its_index_names(
    tiny, open_tiny, tiny_folder, tmp_path
):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder("flux3"), folder)
    index = folder / MODULAR_INDEX
    entries = json.loads(index.read_text())
    entries["vae"][2]["pretrained_model_name_or_path"] = "somebody/else"
    index.write_text(json.dumps(entries))
    latents = torch.randn(1, *tiny("flux3").latent_shape)
    drawn = open_tiny("flux3", folder).decode_latents(latents)
    assert (drawn == tiny("flux3").decode_latents(latents)).all()


def test_a_folder_without_a_part_is_refused(open_tiny, tiny_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_folder("flux3"), folder, ignore=shutil.ignore_patterns("vae"))
    with pytest.raises(ModelError, match="cannot be read as a flux3 base model"):
        open_tiny("flux3", folder)


def test_a_distilled_network_is_refused(tiny):
    model = tiny("flux3")
    distilled = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(flow_map=True)))
    with pytest.raises(ModelError, match="is distilled to few steps"):
        type(model)._check_pipeline(distilled, model.config)


@pytest.mark.parametrize("name", ["flux3", "qwen_image_21"])
def test_rows_keep_their_order_where_prompts_differ_in_length(tiny, name):
    model = tiny(name, guidance=1.0)
    wanted = prompts(name, ("a cat", "a red sign, " * 40, "a dog"))
    conditioning = model.encode_prompts(wanted)
    assert conditioning["mask"].sum(1).unique().numel() >= 2
    latents = torch.randn(3, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.9, 0.5, 0.2])
    with torch.no_grad():
        together = predict(model, latents, sigma, conditioning)
        alone = [
            predict(model, latents[row], sigma[row], conditioning.select_rows(row))
            for row in (slice(0, 1), slice(1, 2), slice(2, 3))
        ]
    assert (together - torch.cat(alone)).abs().max() < 1e-5 * together.abs().max()


def test_a_folder_of_tokens_is_measured_with_the_latents_of_its_vae(tiny):
    model = tiny("flux3")
    sizes, sample = measure_model(model.config)
    # 64 x 64 pixels are 4 x 4 tokens.
    assert sample.tokens == 16 + model.max_tokens
    assert 0 < sizes.decoding < sizes.decoding_with_gradient
    assert sizes.unused == sum(
        value.numel()
        for name, value in model.transformer.named_parameters()
        if "image_cond" in name
    )
    assert not any("image_cond" in name for name in sizes.linears)
