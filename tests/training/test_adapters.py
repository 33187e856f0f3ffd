"""Variants of LoRA, and training of some layers alone."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import SD3Transformer2DModel

from ebbflow.data.model_sizes import count_lora_parameters
from ebbflow.models import load_model
from ebbflow.models.base import predict as velocity
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyError, PolicyMetadata
from ebbflow.training.start import convert_lora_parameters as published_parameters
from tests.parameters import move, same, values

SMALL = {"train": "lora", "rank": 4, "alpha": 12}
ATTENTION = ["*.attn.to_?", "*.attn.add_v_proj"]
VARIANTS = {
    "kaiming": PolicyConfig(**SMALL, init="kaiming"),
    "rslora": PolicyConfig(**SMALL, rslora=True),
    "dora": PolicyConfig(**SMALL, dora=True, rslora=True),
    "some layers": PolicyConfig(**SMALL, layers=ATTENTION),
    "full, some layers": PolicyConfig(layers=ATTENTION),
}
EACH = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def predict(of):
    """The velocity at fixed points."""
    latents = torch.randn(3, *of.latent_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return of.predict_velocity(
            latents, torch.tensor([1.0, 0.5, 0.1]), of.encode_texts(["ABCD", "WXYZ", "Q"])
        )


def saved(policy, folder):
    config = policy.config
    policy.save_folder(
        folder, PolicyMetadata(base_digest="base", recipe_digest="recipe", config=config, version=3)
    )
    return folder


@EACH
def test_it_starts_at_the_base_and_comes_back_exactly(base_folder, model, tmp_path, config):
    base = predict(model)
    policy = Policy(model, config, 0)
    assert torch.equal(predict(model), base)
    move(policy)
    assert (predict(model) - base).abs().max() > 1e-3
    saved(policy, tmp_path / "policy")
    loaded = Policy(load_model(base_folder), config, seed=99)
    loaded.load_folder(tmp_path / "policy")
    assert same(values(loaded), values(policy))
    assert torch.equal(predict(loaded.model), predict(model))
    with loaded.use_copy("reference"):
        assert torch.equal(predict(loaded.model), base)


@EACH
def test_diffusers_computes_the_same(base_folder, open_pipeline, model, tmp_path, config):
    policy = Policy(model, config, 0)
    move(policy)
    saved(policy, tmp_path / "policy")
    peer = load_model(base_folder)
    if config.train == "lora":
        pipeline = open_pipeline(base_folder)
        pipeline.load_lora_weights(tmp_path / "policy")
        peer.transformer = pipeline.transformer
    else:
        peer.transformer = SD3Transformer2DModel.from_pretrained(
            tmp_path / "policy" / "transformer"
        ).eval()
    assert (predict(peer) - predict(model)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["rslora", "dora"])
def test_merged_adapter_equals_its_closed_form(base_folder, model, name):
    """rsLoRA: W + alpha / sqrt(r) B A; DoRA: its rows, each with a trained length m."""
    policy = Policy(model, config := VARIANTS[name], 0)
    move(policy, 0.05)
    alone = load_model(base_folder)
    weights = dict(alone.transformer.named_parameters())
    with torch.no_grad():
        for key, first in policy.parameters.items():
            if ".lora_A." not in key:
                continue
            layer = key.removesuffix(".lora_A.default.weight")
            second = policy.parameters[f"{layer}.lora_B.default.weight"]
            weight = weights[f"{layer}.weight"]
            weight += 12 / math.sqrt(4) * second @ first
            if config.dora:
                length = policy.parameters[f"{layer}.lora_magnitude_vector.default.weight"]
                weight *= (length / weight.norm(dim=1))[:, None]
    assert (predict(alone) - predict(model)).abs().max() < 1e-5


def test_dora_starts_at_a_rounded_base(base_folder):
    rounded = {}
    for name, config in {"dora": VARIANTS["dora"], "lora": PolicyConfig(**SMALL)}.items():
        policy = Policy(load_model(base_folder, ModelConfig(precision="bfloat16")), config, 0)
        latents = torch.randn(
            2, *policy.model.latent_shape, generator=torch.Generator().manual_seed(1)
        )
        with torch.no_grad():
            rounded[name] = velocity(
                policy.model,
                latents,
                torch.tensor([1.0, 0.1]),
                policy.model.encode_texts(["ABCD", "Q"]),
            )
        assert all(value.dtype == torch.float32 for value in policy.parameters.values())
    assert torch.equal(rounded["dora"], rounded["lora"])


def test_dora_is_never_merged(model):
    policy = Policy(model, VARIANTS["dora"], 0)
    move(policy)
    separate = predict(model)
    with policy.merge_adapters():
        assert torch.equal(predict(model), separate)


@pytest.mark.parametrize("name", ["some layers", "full, some layers"])
def test_only_the_chosen_layers_are_trained(model, name):
    layers = {
        key.rpartition(".attn.")[2].partition(".")[0]
        for key in Policy(model, VARIANTS[name], 0).parameters
    }
    assert layers == {"to_q", "to_k", "to_v", "add_v_proj"}


def test_kaiming_is_uniform_and_gaussian_is_not(base_folder):
    """Of 1 / sqrt(inputs) at most, as torch's own linear layers."""
    first = {}
    for init in ("kaiming", "gaussian"):
        policy = Policy(load_model(base_folder), PolicyConfig(**SMALL, init=init), 0)
        first[init] = next(value for key, value in policy.parameters.items() if "lora_A" in key)
    bound = 1 / math.sqrt(first["kaiming"].shape[1])
    assert 0.9 * bound < first["kaiming"].abs().max() <= bound < first["gaussian"].abs().max()


@pytest.mark.parametrize("train", ["lora", "full"])
def test_layers_that_do_not_exist_are_named(model, train):
    with pytest.raises(
        PolicyError,
        match=r"policy.layers = \['blocks.9.\*'\]: no layer .*has such a name. Layers are called ",
    ):
        Policy(model, PolicyConfig(train=train, layers=["blocks.9.*"]), 0)


def test_dora_is_fused_as_an_export_does_it(model):
    policy = Policy(model, VARIANTS["dora"], 0)
    move(policy)
    before = predict(model)
    model.transformer.fuse_lora(adapter_names=["default"])
    assert (predict(model) - before).abs().max() < 1e-5


def test_a_published_lora_is_no_dora(base_folder, model, tmp_path):
    policy = Policy(load_model(base_folder), VARIANTS["dora"], 0)
    saved(policy, tmp_path / "dora")
    plain = PolicyConfig(**SMALL)
    fresh = Policy(model, plain, 0)
    with pytest.raises(PolicyError, match="is a DoRA, whose magnitudes have no place in a LoRA"):
        published_parameters(model, plain, fresh.parameters, tmp_path / "dora")
    with pytest.raises(PolicyError, match="policy.dora starts from a policy folder alone"):
        published_parameters(model, VARIANTS["dora"], policy.parameters, tmp_path / "dora")


def test_lora_parameters_are_counted_without_a_model(model):
    linears = {
        name: (layer.in_features, layer.out_features)
        for name, layer in model.transformer.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    policy = Policy(model, VARIANTS["dora"], 0)
    assert count_lora_parameters(linears, model.lora_targets, 4, dora=True) == sum(
        map(torch.numel, policy.parameters.values())
    )


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"policy": {"dora": True, "init": "kaiming"}},
            "init, dora: is for adapters; set train to lora",
        ),
        (
            {
                "policy": {"train": "lora", "rslora": True},
                "model": {"family": "sd3", "path": "base"},
                "stages": [{"kind": "online", "engine": "vllm_omni"}],
            },
            "knows adapters without policy.rslora and policy.dora",
        ),
    ],
)
def test_what_does_not_fit_is_explained(recipe, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate(recipe)
