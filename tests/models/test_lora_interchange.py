"""What a policy saves, diffusers loads: adapters into the family's pipeline, whole weights as its
transformer.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from pipeline_cases import (
    NEWER_FAMILIES_IN_TEST_ALL,
    SHORT,
    SIMILAR_FAMILIES_IN_TEST_ALL,
    family,
    needs_torchvision,
    our_latents,
    prompts,
    their_latents,
    theirs,
)

from ebbflow.models import modular
from ebbflow.models import pipeline as pipelines
from ebbflow.models.base import find_lora_class, is_trainable
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import digest_of_folder
from ebbflow.training import parameter_files
from ebbflow.training.export import export_pipeline, how_to_load_pipeline
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from ebbflow.training.start import convert_lora_parameters

LORA = PolicyConfig(train="lora", rank=4, alpha=12)
FULL = PolicyConfig(train="full")


def trained(model, config, folder, drawn_by=ModelConfig(), base="base"):
    """A policy with random changes, saved."""
    policy = Policy(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save_folder(
        folder,
        PolicyMetadata(
            base_digest=base, recipe_digest="recipe", config=config, version=1, model=drawn_by
        ),
    )
    return policy


def name_adapted_layers(parameters):
    """Name the layers that an adapter changes. diffusers' loader of Wan adds factors of zeros to
    the layers that read an image.
    """
    return {
        name.partition(".lora_B")[0]
        for name, value in parameters.items()
        if ".lora_B" in name and value.any()
    }


@pytest.mark.parametrize("name", SIMILAR_FAMILIES_IN_TEST_ALL)
def test_the_pipeline_loads_our_adapter_and_draws_our_image(
    open_tiny, tiny, open_peer, tmp_path, name
):
    model = open_tiny(name)
    pipeline = open_peer(name)
    wanted = prompts(name, SHORT[:2])
    base = our_latents(tiny(name), wanted)
    policy = trained(model, LORA, tmp_path / "policy")
    ours = our_latents(model, wanted)
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(tmp_path / "policy")
    else:
        pipeline.transformer.load_lora_adapter(
            tmp_path / "policy", weight_name="pytorch_lora_weights.safetensors"
        )
    (loaded,) = pipeline.transformer.peft_config.values()
    assert (loaded.r, loaded.lora_alpha) == (4, 12)
    # By layer, since peft writes many targets in a shorter form.
    assert name_adapted_layers(pipeline.transformer.state_dict()) == name_adapted_layers(
        policy.parameters
    )
    latents, images = theirs(pipeline, model, wanted)
    assert (latents - ours).abs().max() < 1e-4
    assert abs(model.decode_latents(ours) - images).max() < 1
    assert (ours - base).abs().max() > 1e-2
    # And we load it ourselves.
    again = Policy(open_tiny(name), LORA, seed=1)
    again.load_folder(tmp_path / "policy")
    assert all(
        torch.equal(value, policy.parameters[key]) for key, value in again.parameters.items()
    )


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_every_target_of_every_block_is_adapted(open_tiny, name):
    model = open_tiny(name)
    layers = [
        key
        for key, module in model.transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and is_trainable(model, key)
    ]
    wanted = {
        key for key in layers if any(key.endswith(f".{target}") for target in model.lora_targets)
    }
    for target in model.lora_targets:
        assert any(key.endswith(f".{target}") for key in wanted), f"{target} names no layer"
    adapted = {key.split(".lora_")[0] for key in Policy(model, LORA, seed=0).parameters}
    assert adapted == wanted


@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_whole_weights_load_as_the_familys_transformer_from_several_files(
    open_tiny, monkeypatch, tmp_path, name
):
    monkeypatch.setattr(
        parameter_files,
        "save_torch_state_dict",
        partial(parameter_files.save_torch_state_dict, max_shard_size="100KB"),
    )
    model = open_tiny(name)
    wanted = prompts(name, SHORT[:1])
    policy = trained(model, FULL, tmp_path / "policy")
    folder = tmp_path / "policy" / "transformer"
    assert len(list(folder.glob("*.safetensors"))) > 1
    loaded = type(model.transformer).from_pretrained(folder, local_files_only=True)
    ours = model.transformer.state_dict()
    theirs = loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    image = our_latents(model, wanted)
    model.transformer = loaded.eval()
    assert (our_latents(model, wanted) - image).abs().max() < 1e-4
    again = Policy(open_tiny(name), FULL, seed=0)
    again.load_folder(tmp_path / "policy")
    assert all(
        torch.equal(value, policy.parameters[key]) for key, value in again.parameters.items()
    )


@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_a_lora_that_the_pipeline_wrote_is_a_start_that_draws_its_image(
    open_tiny, open_peer, tmp_path, name
):
    model = open_tiny(name)
    pipeline = open_peer(name)
    wanted = prompts(name, SHORT[:2])
    transformer = pipeline.transformer
    targets = [
        key
        for key, _ in transformer.named_modules()
        if key.endswith(tuple(f".{target}" for target in model.lora_targets[:2]))
        and is_trainable(model, key)
    ]
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=6, target_modules=targets))
    generator = torch.Generator().manual_seed(0)
    for key, parameter in transformer.named_parameters():
        if "lora_" in key:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    find_lora_class(model).save_lora_weights(
        tmp_path / "published",
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
    )
    base = our_latents(model, wanted)
    policy = Policy(model, LORA, seed=0)
    policy.assign_parameters(
        convert_lora_parameters(model, LORA, policy.parameters, tmp_path / "published")
    )
    ours = our_latents(model, wanted)
    assert (their_latents(pipeline, model, wanted) - ours).abs().max() < 1e-4
    assert (ours - base).abs().max() > 1e-2


@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_an_exported_policy_is_a_pipeline_folder_in_shards(
    open_tiny, open_peer, tiny_folder, monkeypatch, tmp_path, name, config
):
    for module in (pipelines, modular):
        monkeypatch.setattr(module, "SHARD", "100KB")
    model = open_tiny(name)
    wanted = prompts(name, SHORT[:1])
    trained(model, config, tmp_path / "policy", model.config, digest_of_folder(tiny_folder(name)))
    ours = our_latents(model, wanted)
    export_pipeline(tiny_folder(name), tmp_path / "policy", tmp_path / "exported")
    assert len(list((tmp_path / "exported" / "transformer").glob("*-of-*.safetensors"))) > 1
    pipeline = open_peer(name, folder=tmp_path / "exported")
    assert (their_latents(pipeline, model, wanted) - ours).abs().max() < 1e-4
    if not needs_torchvision(name):
        names = {}
        exec(how_to_load_pipeline(tmp_path / "exported", family(name)), names)
        assert type(names["pipeline"]) is type(pipeline)
