"""The learning rate of each optimiser step and each parameter, and AdamW as the recipe has it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from training_cases import FULL, LORA, NFT, forward_rows, stage_of

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.optimizer_config import LearningRateScheduleConfig, OptimizerConfig
from ebbflow.recipe.stages import OfflineStageConfig
from ebbflow.training.optimizer import build_optimizer
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.parameters import same, values


def rates(count, num_updates=None, **keys):
    schedule = LearningRateScheduleConfig(**keys)
    return [schedule.share_of_update(update, num_updates) for update in range(count)]


def from_torch(scheduler, steps, **keys):
    """The rates of one of torch's schedulers, of a rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = scheduler(optimizer, **keys)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_without_a_schedule_the_rate_stays():
    assert rates(5) == [1.0] * 5


def test_the_warmup_is_even_and_ends_at_the_rate():
    assert rates(6, warmup=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(5, 5, kind="linear", warmup=1) == [0.5, 1.0, 0.75, 0.5, 0.25]


def test_linear_and_cosine_are_those_of_torch():
    assert rates(12, 10, kind="linear", final=0.2) == pytest.approx(
        from_torch(LinearLR, 12, start_factor=1, end_factor=0.2, total_iters=10)
    )
    assert rates(10, 10, kind="cosine", final=0.2) == pytest.approx(
        from_torch(CosineAnnealingLR, 10, T_max=10, eta_min=0.2)
    )
    assert rates(14, 99, kind="cosine", updates=10)[10:] == pytest.approx([0.0] * 4, abs=1e-15)


def test_every_step_has_the_rate_of_its_number(model):
    """The last of them is 0, and leaves the parameters as they are."""
    policy = Policy(model, FULL, 0)
    schedule = {"kind": "cosine", "updates": 3, "warmup": 1}
    stage = stage_of(NFT, steps=2, updates_per_step=2, optimizer={"lr": 0.01, "schedule": schedule})
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, stage)
    seen = [values(policy)]
    shown = []
    for _ in range(4):
        shown.append(updater.update_policy(forward_rows(model, stage), 2)["lr"])
        seen.append(values(policy))
    assert shown == pytest.approx([0.005, 0.01, 0.005, 0.0])
    assert [same(before, after) for before, after in pairwise(seen)] == [False, False, False, True]


def test_a_stage_that_does_not_know_its_steps_says_so(model):
    stage = OfflineStageConfig.model_validate({"optimizer": {"schedule": {"kind": "linear"}}})
    policy = Policy(model, FULL, 0)
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, stage)
    with pytest.raises(RecipeError, match=r"set optimizer\.schedule\.updates"):
        updater.update_policy(forward_rows(model, stage), 2)
    updater.num_updates = 10
    updater.update_policy(forward_rows(model, stage), 2)


def gradients(policy, seed):
    draws = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=draws)
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items()}


def test_one_step_is_adams_with_its_betas_and_eps(model):
    policy = Policy(model, FULL, 0)
    optimizer = build_optimizer(
        policy, OptimizerConfig(lr=0.1, betas=[0.5, 0.75], eps=0.01, weight_decay=0.0)
    )
    before = values(policy)
    first = gradients(policy, 1)
    second = None
    optimizer.step()
    second = gradients(policy, 2)
    optimizer.step()
    for name, after in values(policy).items():
        expected = before[name].double()
        mean = 0.0
        square = 0.0
        for step, gradient in enumerate((first[name].double(), second[name].double()), 1):
            mean = 0.5 * mean + 0.5 * gradient
            square = 0.75 * square + 0.25 * gradient**2
            root = (square / (1 - 0.75**step)).sqrt() + 0.01
            expected = expected - 0.1 * mean / (1 - 0.5**step) / root
        assert torch.allclose(after.double(), expected, rtol=0, atol=1e-5), name


def test_the_defaults_are_torchs(model):
    config = OptimizerConfig(lr=1e-3)
    plain = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], lr=1e-3, weight_decay=1e-4, fused=True
    ).param_groups[0]
    ours = build_optimizer(Policy(model, FULL, 0), config).param_groups
    assert len(ours) == 1
    assert {**ours[0], "params": None} == {**plain, "params": None}


def test_a_pattern_has_its_own_rate(model):
    policy = Policy(model, LORA, 0)
    factors = [{"parameters": "*.lora_B.*", "factor": 16}, {"parameters": "*to_q*", "factor": 0}]
    stage = stage_of(NFT, optimizer={"lr": 1e-3, "lr_factors": factors, "weight_decay": 0.5})
    policy.ensure_copy("old")
    updater = PolicyUpdater(policy, stage)
    before = values(policy)
    rate = {id(p): group["lr"] for group in updater.optimizer.param_groups for p in group["params"]}
    for name, parameter in policy.parameters.items():
        expected = 0.016 if "lora_B" in name else 0.0 if "to_q" in name else 0.001
        assert math.isclose(rate[id(parameter)], expected), name
    updater.update_policy(forward_rows(model, stage), 2)
    assert updater.update_policy(forward_rows(model, stage), 2)["lr"] == 1e-3
    first = {
        name: torch.equal(value, before[name])
        for name, value in policy.parameters.items()
        if "lora_A" in name
    }
    assert first == {name: "to_q" in name for name in first}


def test_a_pattern_that_fits_nothing_is_named(model):
    factors = [{"parameters": "*.lora_*", "factor": 2}, {"parameters": "*.lora_B.*", "factor": 16}]
    with pytest.raises(
        RecipeError, match=r"'\*\.lora_B\.\*' is the first to fit no trained parameter"
    ):
        build_optimizer(
            Policy(model, LORA, 0), OptimizerConfig.model_validate({"lr_factors": factors})
        )


def muon(policy, **keys):
    return build_optimizer(
        policy,
        OptimizerConfig.model_validate({"name": "muon", "lr": 0.1, "weight_decay": 0.0, **keys}),
    )


def test_muons_steps_are_orthogonal_and_as_large_as_adamws(model):
    """Singular values around .2 sqrt(larger side), for every matrix; the rest steps as AdamW does:
    by lr, at first.
    """
    policy = Policy(model, FULL, 0)
    optimizer = muon(policy)
    before = values(policy)
    gradients(policy, 1)
    optimizer.step()
    shapes = set()
    for name, value in policy.parameters.items():
        step = (value.detach() - before[name]) / 0.1
        shapes.add(value.ndim)
        if value.ndim == 2:
            singular = torch.linalg.svdvals(step) / (0.2 * max(value.shape) ** 0.5)
            assert singular.median() == pytest.approx(0.9, abs=0.3), name
            assert singular.max() < 1.3, name
        else:
            assert step.abs().median() == pytest.approx(1, abs=1e-3), name
    assert shapes >= {1, 2, 4}


def test_muon_has_rates_and_momentum_and_one_state(model):
    policy = Policy(model, LORA.model_copy(update={"dora": True}), 0)
    optimizer = muon(policy, momentum=0.5, lr_factors=[{"parameters": "*.lora_B.*", "factor": 4}])
    first = gradients(policy, 1)
    optimizer.step()
    second = gradients(policy, 2)
    optimizer.step()
    for name, parameter in policy.parameters.items():
        state = optimizer.state[parameter]
        if parameter.ndim == 1:
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        else:
            expected = 0.5 * (first[name] * 0.5) + second[name] * 0.5
            assert torch.allclose(state["momentum_buffer"], expected, atol=1e-6), name
    assert sorted(group["lr"] for group in optimizer.param_groups) == pytest.approx([0.1, 0.1, 0.4])
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in policy.parameters.values())


def test_momentum_without_muon_is_an_error():
    with pytest.raises(ValueError, match="momentum is for name: muon, and adamw has betas"):
        OptimizerConfig(momentum=0.9)
