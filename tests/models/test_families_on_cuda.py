"""On CUDA every family encodes, generates, decodes and trains without mixing devices, gives the
bytes of the CPU, and waits for the device as seldom as its budget says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_cases import few_tokens, keys, prompts

from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.models.encoding import build_prompt_lookup
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import build_trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage
from tests.pretend_cuda.device import PretendDevice, pretend_cuda

LORA = PolicyConfig(train="lora", rank=4, alpha=8)
WINDOW = (0, 1)
BUDGETS = {
    "sd3": (5, 0, 3),
    "flux": (8, 0, 3),
    "qwen_image": (10, 0, 3),
    "wan": (5, 0, 3),
    "wan_a14b": (5, 6, 11),
    "flux2": (11, 0, 3),
    "flux_kontext": (11, 0, 3),
}
"""Copies to the device in a rollout of three denoising steps, waits for the device in it, and
waits in an update: for the groups of its rows, for all of its numbers at once, and one of torch's
where it clips the gradient. FLUX copies the positions of its tokens in each forward pass; the
experts of Wan2.2-A14B ask in each whose rows there are.
"""


def count_traffic(device: PretendDevice) -> tuple[int, int]:
    """(copies to the device, copies back and other waits) since the last call."""
    counts = (
        device.host_to_device.total(),
        device.device_to_host.total() + device.synchronizations,
    )
    for counter in (device.host_to_device, device.device_to_host, device.waits):
        counter.clear()
    return counts


def train_a_step(
    config: ModelConfig, name: str, device: PretendDevice | None = None
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """(all that came out of a rollout, its pictures and an update on it; the traffic of each)."""
    traffic = {}
    stage = OnlineStageConfig.model_validate(
        small_stage({"sampler": {"steps": 3}, "algorithm": {"name": "flow_grpo"}})
    )
    model = load_model(Path(config.path or ""), config, weights_later=True)
    policy = Policy(model, LORA, 0)
    updater = PolicyUpdater(policy, stage)
    wanted = prompts(name)[:2]
    conditioning = build_prompt_lookup(model, wanted)(wanted)
    if device:
        count_traffic(device)
    rollouts = generate_samples(
        model, conditioning, keys(wanted), stage.sampler, Plan(WINDOW, WINDOW)
    )
    if device:
        traffic["rollout"] = count_traffic(device)
    images = model.decode_latents(rollouts.latents)
    assert rollouts.trajectory is not None
    batch = build_trajectory_batch(
        rollouts.trajectory,
        conditioning,
        torch.tensor([1.0, -1.0]),
        keys(wanted),
        stage.sampler,
    )
    if device:
        count_traffic(device)
    metrics = updater.update_policy(batch, 2)
    if device:
        traffic["update"] = count_traffic(device)
    parameters = {key: value.detach().cpu() for key, value in policy.parameters.items()}
    return {"images": images, "metrics": metrics, "parameters": parameters}, traffic


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "sd3" else pytest.mark.exhaustive) for name in BUDGETS],
)
def test_a_step_on_cuda(tiny_folder, name):
    settings: dict[str, Any] = {"height": 64, "width": 64, **few_tokens(name)}
    config = ModelConfig(family=name, path=str(tiny_folder(name)), **settings)
    expected, _ = train_a_step(config, name)
    with pretend_cuda() as device:
        results, traffic = train_a_step(config, name, device)
    assert results["metrics"] == expected["metrics"]
    assert results["metrics"]["ratio/deviation"] == 0
    assert np.array_equal(results["images"], expected["images"])
    for key, value in expected["parameters"].items():
        assert torch.equal(results["parameters"][key], value), key
    copies, waits, waits_of_update = BUDGETS[name]
    assert traffic["rollout"][0] <= copies
    assert traffic["rollout"][1] <= waits
    assert traffic["update"][1] <= waits_of_update
