"""An optimiser of a user's own: one file, examples/mine/sign_descent.py, no change in Ebbflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from ebbflow.recipe.optimizer_config import OptimizerConfig
from ebbflow.recipe.optimizers import built_in_optimizers
from ebbflow.training.optimizer import build_optimizer
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.training.training_cases import FULL, NFT, stage_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SIGN_DESCENT = {"name": "mine.sign_descent:SIGN_DESCENT", "lr": 0.01}


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_an_own_optimizer_moves_each_parameter_by_its_learning_rate(model, cpu_offload):
    policy = Policy(model, FULL, 0, cpu_offload=cpu_offload)
    factor = {"parameters": "*bias", "factor": 0.5}
    config = OptimizerConfig.model_validate({**SIGN_DESCENT, "lr_factors": [factor]})
    optimizer = build_optimizer(policy, config)
    parameters = {name: p.detach().clone() for name, p in policy.parameters.items()}
    for parameter in policy.parameters.values():
        parameter.grad = torch.full_like(parameter, -2.0)
    optimizer.step()
    for name, parameter in policy.parameters.items():
        step = 0.005 if name.endswith("bias") else 0.01
        torch.testing.assert_close(parameter.detach(), parameters[name] + step)


def test_a_stage_trains_with_an_own_optimizer(model):
    stage = stage_of(NFT, optimizer=SIGN_DESCENT)
    assert stage.optimizer.factory.count_state_bytes(100) == 0
    updater = PolicyUpdater(Policy(model, FULL, 0), stage)
    assert type(updater.optimizer).__name__ == "SignSGD"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamv", r"did you mean 'adamw'\? Take adamw, adamw_8bit, muon, or give package"),
        ("mine.sign_descent:SIGN", "has no 'SIGN'; did you mean 'SIGN_DESCENT'"),
        ("mine.sign_descent:SignSGD", "is a type, not an instance of an .*OptimizerFactory"),
    ],
)
def test_a_wrong_optimizer_is_an_error_that_names_the_fix(name, message):
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(name=name)


def test_every_file_of_optimizers_defines_one():
    assert list(built_in_optimizers()) == ["adamw", "adamw_8bit", "muon"]
