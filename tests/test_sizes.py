"""The sizes of models: of tiny folders, against the modules that diffusers and transformers load
from them, and what else takes memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ebbflow.data.prompts import Prompt
from ebbflow.estimate.measured import measure_cached
from ebbflow.estimate.run import count_trained_parameters, estimate_recipe
from ebbflow.models import load_model
from ebbflow.models.families.glyph import build_glyph_model
from ebbflow.models.sizes import measure_model
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.model import ModelConfig
from tests.conftest import TINY_SIZES
from tests.parameters import count_parameters

RECIPES = Path(__file__).parents[1] / "workflows" / "recipes"


@pytest.mark.parametrize("family", TINY_SIZES)
def test_a_folder_is_as_large_as_what_is_loaded_from_it(tiny_recipe, family):
    recipe = tiny_recipe(family)
    model, (sizes, sample) = (
        load_model(Path(recipe.model.path), recipe.model),
        measure_model(recipe.model),
    )
    assert sizes.parameters == count_parameters(model.transformer)
    assert (
        sizes.buffers
        == sum(value.numel() for value in model.transformer.state_dict().values())
        - sizes.parameters
    )
    assert sizes.blocks == len(model.list_blocks())
    assert sizes.vae == count_parameters(model.pipeline.vae)
    encoders = [getattr(model.pipeline, part) for part in model.text_parts if part != "vae"]
    assert sizes.text_encoders == sum(map(count_parameters, encoders))
    linears = {
        name: layer
        for name, layer in model.transformer.named_modules()
        if isinstance(layer, nn.Linear)
    }
    assert sizes.linears == {
        name: (layer.in_features, layer.out_features) for name, layer in linears.items()
    }
    assert sample.latent_shape == model.latent_shape
    assert sample.pixels == model.height * model.width


@pytest.mark.parametrize("family", ["sd3", "flux", "wan"])
def test_tokens_and_prompts_are_those_that_the_network_gets(tiny_recipe, family):
    recipe = tiny_recipe(family, {"max_tokens": 24})
    model = load_model(Path(recipe.model.path), recipe.model)
    seen = []
    _, sample = measure_model(recipe.model)
    conditioning = model.encode_prompts([Prompt(0, "a cup", "", None, "test", "train", "{}")])
    model.list_blocks()[0].register_forward_pre_hook(
        lambda block, args, keys: seen.append(
            (keys.get("hidden_states", *args[:1]), keys.get("encoder_hidden_states"))
        ),
        with_kwargs=True,
    )
    model.predict_velocity(torch.zeros(1, *model.latent_shape), torch.full((1,), 0.5), conditioning)
    tokens = seen[0][0].shape[1] + (0 if family == "wan" else seen[0][1].shape[1])
    assert sample.tokens == tokens
    assert sample.text_tokens == conditioning["embeds"].shape[1]
    assert sample.conditioning == conditioning["embeds"].numel()


def test_videos_have_frames_and_tokens_for_them(tiny_recipe):
    one, nine = (
        measure_model(tiny_recipe("wan", {"frames": frames}).model)[1] for frames in (1, 9)
    )
    assert nine.latent_shape[1] == 3 * one.latent_shape[1] == 3
    assert (nine.tokens, nine.pixels) == (3 * one.tokens, 9 * one.pixels)


def test_the_vae_takes_a_latents_frames_at_a_time(tiny_recipe):
    large = {"height": 704, "width": 1280}
    taken = [
        estimate_recipe(tiny_recipe("wan", large | {"frames": frames}))
        .memory["evaluation"]
        .activations
        for frames in (1, 5, 9)
    ]
    assert taken[0] < taken[1] == taken[2]


def test_the_glyph_model_trained_here_is_as_large_as_its_folder(tmp_path):
    here = Recipe()
    there = Recipe.model_validate({"model": {"path": str(tmp_path)}})
    model = build_glyph_model(here.model.training)
    model.save(tmp_path)
    samples = []
    for recipe in (here, there):
        sizes, sample = measure_model(recipe.model)
        samples.append(sample)
        assert (sizes.parameters, sizes.text_encoders, sizes.vae) == (
            count_parameters(model.transformer),
            count_parameters(model.text_encoder),
            0,
        )
        assert sample.latent_shape == model.latent_shape
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("family", "model"), [("sd3", {}), ("wan", {"frames": 5})], ids=["image", "video"]
)
def test_decoding_with_gradient_takes_what_autograd_keeps_and_little_more(
    tiny_recipe, family, model
):
    recipe = tiny_recipe(family, model | {"height": 128, "width": 128})
    loaded, (sizes, sample), kept = (
        load_model(Path(recipe.model.path), recipe.model),
        measure_model(recipe.model),
        {},
    )
    own = {value.untyped_storage().data_ptr() for value in loaded.pipeline.vae.parameters()}

    def keep(value):
        storage = value.untyped_storage()
        kept.update({storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in own else {})
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loaded.decode_with_gradient(torch.zeros(1, *loaded.latent_shape).requires_grad_())
    assert (
        sizes.decoding
        < 0.8 * sum(kept.values()) / sample.pixels
        < 0.8 * sizes.decoding_with_gradient * 1.05
    )
    assert sizes.decoding_with_gradient < 1.4 * sum(kept.values()) / sample.pixels


def test_sizes_of_a_sample_of_several_latents_are_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = ModelConfig(
        family="ltx2", path="Lightricks/LTX-2", revision="0" * 40, height=512, width=768, frames=121
    )
    _, sample = measure_cached(model)
    assert sample.latent_shape == (786_432 + 16_128,)
    monkeypatch.setattr("ebbflow.models.sizes.measure_model", None)
    assert measure_cached(model)[1] == sample


def test_the_transformer_that_is_not_trained_takes_memory_too():
    model = {
        "family": "wan_a14b",
        "path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "revision": "0" * 40,
        "precision": "bfloat16",
    }
    recipe = Recipe.model_validate(
        {"model": model, "policy": {"train": "lora", "rank": 8, "alpha": 8}}
    )
    made = estimate_recipe(recipe)
    assert made.sizes.frozen == made.sizes.parameters == 14_288_491_584
    assert made.memory["evaluation"].weights > 2 * 2 * 14_288_491_584
    sizes, _ = measure_model(ModelConfig(**model, expert="both"))
    assert (sizes.parameters, sizes.frozen, sizes.blocks) == (2 * 14_288_491_584, 0, 80)


def test_an_image_that_the_network_sees_beside_its_latents_counts_with_the_prompt():
    """Four channels of a mask and sixteen of latents, of 81 frames of 480 x 832."""
    model = ModelConfig(
        family="wan_i2v", path="Wan-AI/Wan2.2-I2V-A14B-Diffusers", revision="0" * 40, frames=81
    )
    sizes, sample = measure_model(model)
    assert (sizes.parameters, sizes.frozen) == (14_288_901_184, 14_288_901_184)
    assert sample.conditioning == 512 * 4096 + (4 + 16) * 21 * 60 * 104


def test_images_that_clip_sees_count_with_the_prompt():
    """The above, of 720 x 1280, and 257 tokens of each of two images."""
    model = ModelConfig(
        family="wan_flf2v",
        path="Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
        revision="0" * 40,
        frames=81,
    )
    _, sample = measure_model(model)
    assert sample.conditioning == 512 * 4096 + (4 + 16) * 21 * 90 * 160 + 2 * 257 * 1280


def test_a_published_lora_has_382_matrices_of_rank_32():
    """As a run of Flow-GRPO's script on SD3.5-medium counted: 18,776,064 parameters, 382 tensors of
    32 x 1536.
    """
    recipe = load_recipe(RECIPES / "sd35_medium_ocr_512.yaml")
    assert (
        count_trained_parameters(recipe, measure_model(recipe.model)[0])
        == 382 * 32 * 1536
        == 18_776_064
    )
