"""Wan2.2-A14B: which of its two transformers denoises, and which is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipeline_cases import SHORT, our_latents, prompts, their_latents
from pydantic import ValidationError

from ebbflow.models import ModelError, predict
from ebbflow.models.families.wan_a14b import EXPERTS
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import digest_of_folder
from ebbflow.training.export import export_pipeline
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyError, PolicyMetadata
from ebbflow.training.start import convert_lora_parameters
from tests.tolerances import assert_equal_to_rounding

LORA = PolicyConfig(train="lora", rank=4, alpha=12)
SIGMAS = torch.tensor([0.9, 0.5])
"""One on each side of the boundary, .875."""


def changed(model):
    """A policy of the model with random adapters."""
    policy = Policy(model, LORA, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize(("expert", "row"), [("high_noise", 0), ("low_noise", 1)])
def test_gradients_are_of_the_rows_of_the_trained_band(open_tiny, expert, row):
    model = open_tiny("wan_a14b", expert=expert, guidance=1.0)
    policy = changed(model)
    conditioning = model.encode_prompts(prompts("wan_a14b", SHORT[:2]))
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = predict(model, latents, SIGMAS, conditioning)
    with torch.no_grad():
        for index, part in enumerate(EXPERTS.values()):
            rows = slice(index, index + 1)
            alone = model._call_expert(
                getattr(model.pipeline, part),
                latents[rows],
                SIGMAS[rows],
                conditioning.select_rows(rows),
            )
            assert_equal_to_rounding(velocity[rows], alone)
    parameters = list(policy.parameters.values())
    for index in (0, 1):
        gradients = torch.autograd.grad(
            velocity[index].square().sum(), parameters, retain_graph=True
        )
        assert any(gradient.any() for gradient in gradients) == (index == row)
    # A pass without any row of the band has a gradient, which is zero.
    outside = slice(1 - row, 2 - row)
    velocity = predict(model, latents[outside], SIGMAS[outside], conditioning.select_rows(outside))
    assert not any(
        gradient.any() for gradient in torch.autograd.grad(velocity.square().sum(), parameters)
    )


def test_the_pipeline_loads_an_adapter_of_the_other_transformer(open_tiny, open_peer, tmp_path):
    model = open_tiny("wan_a14b", expert="low_noise")
    pipeline = open_peer("wan_a14b")
    wanted = prompts("wan_a14b", SHORT[:1])
    base = our_latents(model, wanted)
    metadata = PolicyMetadata(
        base_digest="base", recipe_digest="recipe", config=LORA, version=1, model=model.config
    )
    changed(model).save_folder(tmp_path / "policy", metadata)
    pipeline.load_lora_weights(tmp_path / "policy", load_into_transformer_2=True)
    ours = our_latents(model, wanted)
    assert (their_latents(pipeline, model, wanted) - ours).abs().max() < 1e-4
    assert (ours - base).abs().max() > 1e-2


def test_both_are_trained_in_one_run(open_tiny):
    """Each by the rows of its band."""
    model = open_tiny("wan_a14b", expert="both", guidance=1.0)
    policy = changed(model)
    conditioning = model.encode_prompts(prompts("wan_a14b", SHORT[:2]))
    assert len(model.list_blocks()) == 4
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = predict(model, latents, SIGMAS, conditioning)
    with torch.no_grad():
        parts = [slice(row, row + 1) for row in (0, 1)]
        rows = [
            predict(model, latents[part], SIGMAS[part], conditioning.select_rows(part))
            for part in parts
        ]
    assert_equal_to_rounding(velocity, torch.cat(rows))
    names, parameters = zip(*policy.parameters.items(), strict=True)
    assert {name.split(".")[0] for name in names} == set(EXPERTS.values())
    for row, part in enumerate(EXPERTS.values()):
        gradients = torch.autograd.grad(velocity[row].square().sum(), parameters, retain_graph=True)
        moved = {
            name.split(".")[0]
            for name, gradient in zip(names, gradients, strict=True)
            if gradient.any()
        }
        assert moved == {part}


def test_the_pipeline_loads_adapters_of_both(open_tiny, open_peer, tmp_path):
    model = open_tiny("wan_a14b", expert="both")
    pipeline = open_peer("wan_a14b")
    wanted = prompts("wan_a14b", SHORT[:1])
    base = our_latents(model, wanted)
    metadata = PolicyMetadata(
        base_digest="base", recipe_digest="recipe", config=LORA, version=1, model=model.config
    )
    policy = changed(model)
    policy.save_folder(tmp_path / "policy", metadata)
    pipeline.load_lora_weights(tmp_path / "policy")
    one = their_latents(pipeline, model, wanted)
    pipeline.load_lora_weights(tmp_path / "policy" / "transformer_2", load_into_transformer_2=True)
    ours = our_latents(model, wanted)
    assert (their_latents(pipeline, model, wanted) - ours).abs().max() < 1e-4
    assert min((ours - base).abs().max(), (ours - one).abs().max()) > 1e-2
    again = Policy(open_tiny("wan_a14b", expert="both"), LORA, seed=1)
    again.load_folder(tmp_path / "policy")
    assert all(
        torch.equal(value, policy.parameters[key]) for key, value in again.parameters.items()
    )


@pytest.mark.exhaustive
def test_whole_weights_of_both_are_two_networks_of_diffusers(
    open_tiny, tiny_folder, open_peer, tmp_path
):
    full = PolicyConfig(train="full")
    model = open_tiny("wan_a14b", expert="both")
    wanted = prompts("wan_a14b", SHORT[:1])
    policy = Policy(model, full, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    digest = digest_of_folder(tiny_folder("wan_a14b"))
    metadata = PolicyMetadata(
        base_digest=digest, recipe_digest="recipe", config=full, version=1, model=model.config
    )
    policy.save_folder(tmp_path / "policy", metadata)
    again = Policy(open_tiny("wan_a14b", expert="both"), full, seed=1)
    again.load_folder(tmp_path / "policy")
    assert all(
        torch.equal(value, policy.parameters[key]) for key, value in again.parameters.items()
    )
    export_pipeline(tiny_folder("wan_a14b"), tmp_path / "policy", tmp_path / "exported")
    drawn = their_latents(open_peer("wan_a14b", folder=tmp_path / "exported"), model, wanted)
    assert (drawn - our_latents(model, wanted)).abs().max() < 1e-4


def test_layers_of_both_experts_have_the_names_of_their_parameters(open_tiny):
    policy = Policy(
        open_tiny("wan_a14b", expert="both"),
        LORA.model_copy(update={"layers": ["transformer*.blocks.0.*"]}),
        seed=0,
    )
    assert {name.split(".")[0] for name in policy.parameters} == {"transformer", "transformer_2"}
    assert {".".join(name.split(".")[1:3]) for name in policy.parameters} == {"blocks.0"}
    with pytest.raises(PolicyError, match=r"Layers are called transformer\."):
        Policy(
            open_tiny("wan_a14b", expert="both"),
            LORA.model_copy(update={"layers": ["blocks.0.*"]}),
            seed=0,
        )


def test_a_published_lora_is_of_one_network(open_tiny, tmp_path):
    model = open_tiny("wan_a14b", expert="both")
    with pytest.raises(
        PolicyError,
        match="a LoRA of one network, and model.expert is both; start from a policy folder",
    ):
        convert_lora_parameters(model, LORA, {}, tmp_path)


def test_an_expert_is_of_a_model_with_two(tiny_folder, open_tiny):
    with pytest.raises(
        ValidationError,
        match="expert = 'low_noise': wan has one transformer; leave it out, or take wan_a14b",
    ):
        ModelConfig(family="wan", path="somewhere", expert="low_noise")
    with pytest.raises(
        ModelError, match="wan21 holds one transformer, and wan_a14b has two; family wan takes"
    ):
        open_tiny("wan_a14b", tiny_folder("wan21"))


@pytest.mark.parametrize("name", ["wan_a14b", "wan_i2v"])
def test_each_transformer_has_its_guidance(tiny, peer, name):
    """As ``guidance_scale_2`` of the pipeline."""
    wanted = prompts(name, SHORT[:2])
    alike = our_latents(tiny(name, guidance=4.0), wanted, steps=6)
    model = tiny(name, guidance=4.0, guidance_2=2.0)
    ours = our_latents(model, wanted, steps=6)
    latents = their_latents(peer(name), model, wanted, steps=6)
    assert (ours - latents).abs().max() < 1e-5 * ours.abs().max()
    assert (ours - alike).abs().max() > 1e-2


def test_a_batch_of_both_bands_has_both_scales(tiny):
    """As training's, whose rows are of several steps. A reference's own scale is for both."""
    model = tiny("wan_a14b", guidance=4.0, guidance_2=2.0)
    conditioning = model.encode_prompts(prompts("wan_a14b", SHORT[:2]))
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))

    def predict_under(first, second):
        other = tiny("wan_a14b", guidance=first, guidance_2=second)
        return predict(other, latents, SIGMAS, replace(conditioning, guidance=first))

    both = predict(model, latents, SIGMAS, conditioning)
    assert_equal_to_rounding(both[:1], predict_under(4.0, None)[:1])
    assert_equal_to_rounding(both[1:], predict_under(2.0, None)[1:])
    own = predict(model, latents, SIGMAS, replace(conditioning, guidance=3.0))
    assert_equal_to_rounding(own, predict_under(3.0, None))
    two_of_its_own = replace(conditioning, guidance=3.0, guidance_2=1.5)
    both = predict(model, latents, SIGMAS, two_of_its_own)
    assert_equal_to_rounding(both[:1], predict_under(3.0, None)[:1])
    assert_equal_to_rounding(both[1:], predict_under(1.5, None)[1:])


@pytest.mark.parametrize(
    ("family", "reference", "said"),
    [
        ("wan", {"guidance": 4, "guidance_2": 3, "weight": 0.1}, "wan has one transformer"),
        (
            "wan_a14b",
            {"guidance": 1, "guidance_2": 3, "weight": 0.1},
            "set reference.guidance above 1",
        ),
        ("wan_a14b", {"guidance": 4, "guidance_2": 3, "weight": 0}, "has no guidance"),
    ],
)
def test_a_second_guidance_of_a_reference_has_an_effect_or_is_refused(family, reference, said):
    stage = {"kind": "online", "algorithm": {"name": "crd"}, "reference": reference}
    recipe = {"model": {"family": family, "path": "/models/wan"}, "stages": [stage]}
    with pytest.raises(RecipeError, match=said):
        Recipe.model_validate(recipe)
    usable = stage | {"reference": {"guidance": 4, "guidance_2": 3, "weight": 0.1}}
    model = {"family": "wan_a14b", "path": "/models/wan"}
    recipe = Recipe.model_validate({"model": model, "stages": [usable]})
    assert recipe.stages[0].reference.guidance_2 == 3


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"family": "wan", "guidance": 4, "guidance_2": 3}, "wan has one transformer; leave it"),
        ({"family": "wan_a14b", "guidance_2": 3}, "without guidance; set guidance above 1"),
    ],
)
def test_a_second_guidance_needs_two_guided_transformers(config, said):
    with pytest.raises(ValidationError, match=said):
        ModelConfig(path="/models/wan", **config)
