"""A rollout, its replay and an update of the glyph policy mix no devices on CUDA, and give the
bytes of the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbflow.models import load_model
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate_samples
from tests.pretend_cuda.device import CUDA, PretendDevice, pretend_cuda
from tests.training.training_cases import (
    FULL,
    LORA,
    NFT,
    forward_rows,
    samples,
    trajectory_rows,
    updater_of,
)

CASES = {
    "trajectory": ("flow_grpo", LORA, trajectory_rows),
    "trajectory full": ("mix_grpo", FULL, trajectory_rows),
    "forward": (NFT, FULL, forward_rows),
}


def update(base: Path, case: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, parameters) after a rollout by the policy, where the case has one, and an update,
    which predicts the same steps again.
    """
    algorithm, config, build_rows = CASES[case]
    updater = updater_of(load_model(base), algorithm, config, reference={"weight": 0.1})
    rows = build_rows(updater.policy.model, updater.stage)
    metrics = updater.update_policy(rows, 2)
    return metrics, {name: p.detach().cpu() for name, p in updater.policy.parameters.items()}


def update_on_cuda(base: Path, case: str) -> PretendDevice:
    expected_metrics, expected = update(base, case)
    with pretend_cuda() as device:
        metrics, parameters = update(base, case)
    assert metrics == expected_metrics
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], value) for name, value in expected.items())
    assert device.kernels["aten::addmm"] > 0, f"the network computed on {CUDA}"
    return device


def test_a_rollout_its_replay_and_an_update_mix_no_devices(base_folder):
    device = update_on_cuda(base_folder, "trajectory")
    assert device.host_to_device.total() > 0, "the model was loaded"


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in CASES if case != "trajectory"])
def test_other_kinds_of_updates_mix_no_devices(base_folder, case):
    update_on_cuda(base_folder, case)


def test_denoising_steps_wait_for_no_copy(base_folder):
    def count_blocking_copies(steps: int) -> int:
        with pretend_cuda() as device:
            model = load_model(base_folder)
            _, conditioning, _, keys = samples(model)
            device.blocking_copies.clear()
            device.host_to_device.clear()
            generate_samples(model, conditioning, keys, SamplerConfig(name="flow_sde", steps=steps))
        assert device.host_to_device.total() >= steps, "noise is copied in each step"
        return device.blocking_copies.total()

    assert count_blocking_copies(6) == count_blocking_copies(3)
