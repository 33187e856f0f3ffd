"""AdamW with moments of 8 bits: refused where it cannot be, and where bitsandbytes is, close to
AdamW.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from training_cases import FULL, NFT, forward_rows, stage_of

from ebbflow.models import load_model
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.training.checkpoint import restore_updater, write_part
from ebbflow.training.optimizer import build_optimizer, state_to_tensors
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.parameters import same, values

installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason=(
        "bitsandbytes is not installed: `make test-8bit` installs it into a folder of its own and"
        " runs these tests"
    ),
)
EIGHT = {"name": "adamw_8bit", "lr": 0.01}
LORA = PolicyConfig(train="lora", rank=128, alpha=128)
"""Factors of more than 4,096 elements."""


def recipe_of(stage, **keys):
    return Recipe.model_validate({"stages": [{"optimizer": EIGHT, **stage}], **keys})


def test_nothing_but_one_process_with_its_state_beside_it_takes_it():
    several = {"kind": "online", "placement": "ray", "resources": {"training": {"count": 2}}}
    with pytest.raises(
        RecipeError, match=r"stages\.0\.optimizer\.name = 'adamw_8bit' .* processes; train with one"
    ):
        recipe_of(several)
    for kind in ("online", "offline"):
        with pytest.raises(
            RecipeError,
            match=r"stages\.0\.optimizer\.name .* main memory; leave model\.cpu_offload out",
        ):
            recipe_of({"kind": kind}, model={"cpu_offload": True})
        recipe_of({"kind": kind})
    recipe_of({**several, "optimizer": {"name": "adamw"}}, model={"cpu_offload": True})


def test_an_offline_stage_of_several_processes_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    offline, online = (
        recipe_of({"kind": kind}, output=str(tmp_path)) for kind in ("offline", "online")
    )
    with pytest.raises(
        RecipeError, match=r"stages\.0\.optimizer\.name = 'adamw_8bit' .*EBBFLOW_TRAIN_PROCESSES=1"
    ):
        check_recipe(offline, "", on_cluster=False, processes=2)
    for recipe, processes in ((offline, 1), (online, 2)):
        with pytest.raises(
            RecipeError, match=r"stages\.0\.optimizer\.name = 'adamw_8bit' needs bitsandbytes"
        ):
            check_recipe(recipe, "", on_cluster=False, processes=processes)


def test_a_policy_that_is_sharded_or_offloaded_has_none():
    config = OptimizerConfig.model_validate(EIGHT)
    parameters = {"a": torch.nn.Parameter(torch.zeros(1))}
    for sharded, named in ((True, "processes"), (False, "memory")):
        with pytest.raises(RecipeError, match=f"optimizer.name = 'adamw_8bit' .* {named}"):
            build_optimizer(
                SimpleNamespace(parameters=parameters, sharded=sharded, offloaded=not sharded),
                config,
            )


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        RecipeError, match=r'^optimizer\.name .* run `pip install "ebbflow\[8bit\]"`, or take adamw'
    ):
        build_optimizer(plain(), OptimizerConfig.model_validate(EIGHT))


def plain():
    """What an optimiser needs of a policy: parameters with and without 4,096 elements, and one
    whose last block is not full.
    """
    draws = torch.Generator().manual_seed(0)
    shapes = {"large": (64, 128), "odd": (65, 67), "small": (16,)}
    parameters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=draws))
        for name, shape in shapes.items()
    }
    return SimpleNamespace(parameters=parameters, sharded=False, offloaded=False)


def descend(name, steps, **keys):
    """(parameters, losses) on the way to 1."""
    policy = plain()
    losses = []
    optimizer = build_optimizer(
        policy, OptimizerConfig.model_validate({**EIGHT, "name": name, **keys})
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(((value - 1) ** 2).sum() / 2 for value in policy.parameters.values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return policy.parameters, losses


@installed
@pytest.mark.parametrize(
    "keys", [{}, {"betas": [0.5, 0.9], "weight_decay": 0.1}], ids=["defaults", "other betas"]
)
def test_on_a_quadratic_it_stays_close_to_adamw(keys):
    (exact, expected), (found, losses) = (
        descend(name, 30, **keys) for name in ("adamw", "adamw_8bit")
    )
    assert losses[-1] == pytest.approx(expected[-1], rel=0.01)
    assert losses[-1] < 0.8 * losses[0]
    for name, value in found.items():
        assert (value - exact[name]).abs().max() < (1e-5 if name == "small" else 0.1), name
        assert (value - exact[name]).abs().mean() < 0.01, name


@installed
def test_weights_decay_by_the_rate_and_patterns_have_their_own():
    policy = plain()
    factors = [{"parameters": "odd", "factor": 0.5}]
    config = OptimizerConfig.model_validate({**EIGHT, "weight_decay": 0.5, "lr_factors": factors})
    optimizer = build_optimizer(policy, config)
    before = values(policy)
    for parameter in policy.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in policy.parameters.items():
        expected = before[name] * (1 - 0.01 * (0.5 if name == "odd" else 1) * 0.5)
        assert torch.allclose(value, expected, rtol=1e-6, atol=0), name


@installed
def test_moments_of_large_parameters_take_a_quarter():
    policy = plain()
    optimizer = build_optimizer(policy, OptimizerConfig.model_validate(EIGHT))
    for parameter in policy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in policy.parameters.items():
        state = state_to_tensors(optimizer.state[parameter])
        count = parameter.numel()
        taken = sum(
            value.nbytes for key, value in state.items() if value.ndim and "qmap" not in key
        )
        assert taken == (
            8 * count if name == "small" else 2 * (count + 4 * math.ceil(count / 256))
        ), name


@installed
@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_it_learns_with_the_rates_of_its_schedule(model, config):
    policy = Policy(model, config, 0)
    policy.ensure_copy("old")
    schedule = {"kind": "linear", "warmup": 1, "updates": 11}
    updater = PolicyUpdater(
        policy, stage_of(NFT, optimizer={**EIGHT, "lr": 2e-3, "schedule": schedule})
    )
    rows = forward_rows(model, updater.stage)
    found = []
    seen = [values(policy)]
    for _ in range(12):
        found.append(updater.update_policy(rows, 2))
        seen.append(values(policy))
    assert [row["lr"] for row in found] == pytest.approx(
        [1e-3, *(2e-3 * left / 10 for left in range(10, -1, -1))]
    )
    assert [same(*pair) for pair in pairwise(seen)] == [False] * 11 + [True]
    assert found[-1]["loss"] < found[0]["loss"]
    assert {
        updater.optimizer.state[parameter]["state1"].dtype
        for parameter in policy.parameters.values()
    } >= {torch.uint8}


def begin(base_folder, config):
    policy = Policy(load_model(base_folder), config, 0)
    policy.ensure_copy("old")
    return PolicyUpdater(policy, stage_of(NFT, optimizer=EIGHT))


def push(updater, count, seed):
    """Optimiser steps on made-up gradients."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in updater.policy.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        updater.optimizer.step()


@installed
@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_its_checkpoints_bring_back_every_bit(base_folder, tmp_path, config):
    through, first, second = (begin(base_folder, config) for _ in range(3))
    push(through, 3, seed=1)
    push(first, 3, seed=1)
    with write_new_folder(tmp_path / "checkpoint") as folder:
        write_part(folder, first)
    restore_updater(tmp_path / "checkpoint", second)
    for updater in (through, second):
        push(updater, 2, seed=2)
    assert same(values(through.policy), values(second.policy))
    for name, parameter in through.policy.parameters.items():
        expected = through.optimizer.state[parameter]
        found = second.optimizer.state[second.policy.parameters[name]]
        assert same(state_to_tensors(expected), state_to_tensors(found)), name
        assert {key: type(value) for key, value in found.items()} == {
            key: type(value) for key, value in expected.items()
        }
