"""The layers that a LoRA adapts are stored with it: the default of a family may change, and every
policy that was trained before it goes on.

``tests/released/policy_without_targets`` was written by commit 46996c53, whose ``z_image`` adapted
the attention alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import open_policy
from ebbflow.training.policy_metadata import (
    METADATA,
    PolicyError,
    choose_policy_config,
    read_policy_metadata,
    write_base_policy,
)
from tests.parameters import move, same, values

OLD = Path(__file__).parents[1] / "released" / "policy_without_targets"
ATTENTION = [f"attention.{layer}" for layer in ("to_k", "to_out.0", "to_q", "to_v")]
LORA = PolicyConfig(train="lora", rank=1, alpha=2)


def context_of(config):
    """A stage of a recipe with this policy, as far as opening a policy asks for it."""
    recipe = SimpleNamespace(
        policy=config, seed=0, model=SimpleNamespace(cpu_offload=False, fsdp=None)
    )
    return SimpleNamespace(
        recipe=recipe,
        config=SimpleNamespace(algorithm_name=""),
        following_copies=("old",),
        starts_as_teacher=False,
    )


def test_a_policy_without_targets_adapts_the_layers_of_its_own_file(open_tiny):
    assert json.loads((OLD / METADATA).read_bytes())["config"]["targets"] is None
    model = open_tiny("z_image")
    assert set(ATTENTION) < set(model.lora_targets)
    assert read_policy_metadata(OLD).config.targets == ATTENTION
    policy, _ = open_policy(context_of(LORA), model, OLD)
    stored = load_file(OLD / "pytorch_lora_weights.safetensors")
    assert {f"transformer.{name.replace('.default', '')}" for name in policy.parameters} == set(
        stored
    )
    for name, parameter in policy.parameters.items():
        expected = stored[f"transformer.{name.replace('.default', '')}"]
        assert torch.equal(parameter.detach(), expected)


def test_training_goes_on_with_the_layers_of_the_start_and_stores_them(open_tiny, tmp_path):
    policy, metadata = open_policy(context_of(LORA), open_tiny("z_image"), OLD)
    move(policy)
    policy.save_folder(tmp_path / "trained", metadata)
    assert json.loads((tmp_path / "trained" / METADATA).read_bytes())["config"]["targets"] == (
        ATTENTION
    )
    again, _ = open_policy(context_of(LORA), open_tiny("z_image"), tmp_path / "trained")
    assert same(values(again), values(policy))


def test_a_new_policy_stores_the_layers_of_its_family(open_tiny, tmp_path):
    write_base_policy(tmp_path / "base", "base", "recipe", LORA)
    model = open_tiny("z_image")
    policy, metadata = open_policy(context_of(LORA), model, tmp_path / "base")
    metadata = metadata.model_copy(update={"version": 1})
    policy.save_folder(tmp_path / "trained", metadata)
    assert read_policy_metadata(tmp_path / "trained").config.targets == model.lora_targets
    # A family with another default later opens it as it was trained.
    later = open_tiny("z_image")
    later.lora_targets = ["attention.to_q"]
    again = Policy(later, choose_policy_config(LORA, tmp_path / "trained"), seed=1)
    again.load_folder(tmp_path / "trained")
    assert same(values(again), values(policy))


def test_a_recipe_that_names_other_layers_is_refused(open_tiny):
    named = LORA.model_copy(update={"targets": ["attention.to_q"]})
    with pytest.raises(PolicyError, match=r"attention\.to_k.*the recipe asks for.*to_q"):
        open_policy(context_of(named), open_tiny("z_image"), OLD)
