"""The reference engine: when it merges adapters, and when it must not."""

from __future__ import annotations

import pytest
import torch

from ebbflow.flow.windows import Plan
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.generate import Diffusers, generate_samples
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy
from tests.parameters import move

TEXTS = ["ABCD", "EFGH", "IJKL"]


@pytest.mark.parametrize("plan", [None, Plan((1,), (1,))], ids=["no ratio", "ratio"])
def test_adapters_are_merged_where_training_has_no_ratio(model, make_keys, make_recipe, plan):
    policy = Policy(model, PolicyConfig(train="lora", rank=4, alpha=8), 0)
    move(policy)
    ctx = StageContext(make_recipe(online={"algorithm": {"name": "flow_grpo"}}), 0, 0)
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(3)
    sampler = SamplerConfig(name="flow_sde", steps=3)
    expected = generate_samples(model, conditioning, keys, sampler, plan).latents
    found = Diffusers(ctx, policy).generate(conditioning, keys, sampler, plan)[0].latents
    difference = (found - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max()
    assert (difference == 0) == (plan is not None)
    assert torch.equal(generate_samples(model, conditioning, keys, sampler, plan).latents, expected)
