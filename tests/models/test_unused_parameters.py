"""Parameters of a network that the velocity does not depend on: loaded, kept and not trained. The
example is an LTX-2 whose pictures do not attend to its sound, and whose sound is not denoised.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from pipeline_cases import SHORT, prompts

from ebbflow.estimate.run import count_trained_parameters, estimate_from_sizes
from ebbflow.models import predict
from ebbflow.models.families.ltx2 import LTX2Model
from ebbflow.models.sizes import measure_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyError, PolicyMetadata
from ebbflow.training.start import convert_lora_parameters

FULL = {"train": "full"}
QUERIES = {"train": "lora", "rank": 2, "alpha": 2, "targets": ["to_q"]}


@pytest.fixture
def model(open_tiny, monkeypatch):
    monkeypatch.setattr(LTX2Model, "unused_parameters", ("*audio*", "*a2v*", "av_cross_attn*"))
    model = open_tiny("ltx2", max_tokens=16, guidance=1.0)
    model.transformer.register_forward_pre_hook(
        lambda _, positional, named: (positional, named | {"isolate_modalities": True}),
        with_kwargs=True,
    )
    model.transformer.register_forward_hook(
        lambda _, inputs, velocity: (velocity[0], torch.zeros_like(velocity[1]))
    )
    return model


def without_gradient(model):
    """Names of the parameters that a loss on the velocity gives none."""
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = predict(
        model, latents, torch.tensor([0.8, 0.3]), model.encode_prompts(prompts("ltx2", SHORT[:2]))
    )
    velocity.square().mean().backward()
    return {
        name for name, parameter in model.transformer.named_parameters() if parameter.grad is None
    }


def test_the_parameters_that_change_the_velocity_are_trained_and_no_others(model):
    policy = Policy(model, PolicyConfig(**FULL), 0)
    model.transformer.requires_grad_(True)
    unused = without_gradient(model)
    assert unused > {"audio_proj_in.weight", "audio_proj_out.bias"}
    assert policy.parameters.keys() == dict(model.transformer.named_parameters()).keys() - unused


def test_targets_of_every_attention_adapt_that_of_the_pictures(model):
    policy = Policy(model, PolicyConfig(**QUERIES), 0)
    adapted = {name.split(".lora_")[0].partition("blocks.")[2] for name in policy.parameters}
    assert adapted == {
        f"{block}.{attention}.to_q" for block in (0, 1) for attention in ("attn1", "attn2")
    }
    assert not without_gradient(model) & policy.parameters.keys()


@pytest.mark.parametrize(
    "config", [QUERIES | {"targets": ["audio_attn1.to_q"]}, FULL | {"layers": ["*.audio_attn1.*"]}]
)
def test_targets_and_layers_that_would_change_nothing_are_refused(model, config):
    with pytest.raises(
        PolicyError,
        match=(
            "audio_attn1.*no layer that is trained has such a name. Layers are called proj_in or"
            " proj_out"
        ),
    ):
        Policy(model, PolicyConfig(**config), 0)


def test_a_lora_of_unused_layers_is_no_start(model, open_peer, tmp_path):
    pipeline = open_peer("ltx2")
    pipeline.transformer.add_adapter(
        LoraConfig(r=2, target_modules=["attn1.to_q", "audio_attn1.to_q"])
    )
    pipeline.save_lora_weights(
        tmp_path / "published",
        transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer),
    )
    config = PolicyConfig(**QUERIES)
    policy = Policy(model, config, 0)
    with pytest.raises(
        PolicyError,
        match=(
            "adapts transformer_blocks.0.audio_attn1.to_q, which is never trained; take a LoRA"
            " without"
        ),
    ):
        convert_lora_parameters(model, config, policy.parameters, tmp_path / "published")


@pytest.mark.parametrize("policy", [FULL, QUERIES, {"train": "lora", "rank": 2}])
def test_an_estimate_counts_what_is_trained(model, policy):
    recipe = Recipe.model_validate({"model": model.config.model_dump(), "policy": policy})
    trained = Policy(model, recipe.policy, 0).parameters
    assert count_trained_parameters(recipe, measure_model(recipe.model)[0]) == sum(
        value.numel() for value in trained.values()
    )


def test_a_policy_of_full_training_holds_the_whole_network(model, tmp_path):
    recipe = Recipe.model_validate(
        {"model": model.config.model_dump(), "policy": FULL, "stages": [{"kind": "offline"}]}
    )
    policy = Policy(model, recipe.policy, 0)
    folder = tmp_path / "policy"
    policy.save_folder(
        folder,
        PolicyMetadata(
            base_digest="base",
            recipe_digest="recipe",
            config=recipe.policy,
            version=1,
            model=model.config,
        ),
    )
    loaded = (
        type(model.transformer)
        .from_pretrained(folder / "transformer", local_files_only=True)
        .state_dict()
    )
    whole = model.transformer.state_dict()
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
    # The estimate counts the copies that a stage has besides.
    (work,) = estimate_from_sizes(recipe, 1, *measure_model(recipe.model)).work.values()
    copies = sum(value.nbytes for value in policy.parameters.values())
    assert (work.policy - sum(value.nbytes for value in whole.values())) % copies == 0
