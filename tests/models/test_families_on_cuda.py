"""On CUDA every family encodes, generates, decodes and trains without mixing devices, gives the
bytes of the CPU, and waits for the device as seldom as its budget says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pipeline_cases import EVERY, FIRST_AND_LAST, family, few_tokens, keys, prompts

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


class Budget(NamedTuple):
    """What a phase may take on the device, in float32 with a LoRA.

    Attributes:
        copies: to the device.
        waits: for the device, with copies back from it.
        kernels: started, as many as the CPU's operations.
        casts: of them those that change a precision or a layout.
    """

    copies: int
    waits: int
    kernels: int
    casts: int


BUDGETS = {
    "sd3": (Budget(5, 0, 849, 0), Budget(0, 3, 1773, 14)),
    "flux": (Budget(8, 0, 1440, 18), Budget(4, 3, 2973, 38)),
    "qwen_image": (Budget(10, 0, 1027, 0), Budget(4, 3, 2143, 14)),
    "qwen_image_edit": (Budget(10, 0, 1037, 0), Budget(4, 3, 2157, 14)),
    "wan": (Budget(5, 0, 840, 0), Budget(0, 3, 1897, 14)),
    "wan21": (Budget(5, 0, 840, 0), Budget(0, 3, 1897, 14)),
    "z_image": (Budget(8, 0, 1476, 0), Budget(0, 3, 3223, 14)),
    "flux2_klein": (Budget(11, 0, 1500, 48), Budget(8, 3, 3039, 78)),
    "sana": (Budget(5, 0, 804, 3), Budget(0, 3, 1783, 18)),
    "flux2": (Budget(11, 0, 1545, 48), Budget(8, 3, 3099, 78)),
    "lumina2": (Budget(8, 0, 1293, 33), Budget(0, 3, 2925, 90)),
    "flux_kontext": (Budget(11, 0, 1449, 18), Budget(8, 3, 2991, 38)),
    "wan_a14b": (Budget(5, 0, 686, 0), Budget(0, 3, 2567, 14)),
    "flux2_edit": (Budget(14, 0, 1554, 48), Budget(12, 3, 3117, 78)),
    "qwen_image_edit_plus": (Budget(10, 0, 1037, 0), Budget(4, 3, 2157, 14)),
    "wan_i2v": (Budget(5, 0, 689, 0), Budget(0, 3, 2579, 14)),
    "hunyuan_video": (Budget(5, 0, 1674, 3), Budget(0, 3, 3435, 18)),
    "hunyuan_video_15": (Budget(5, 0, 1356, 6), Budget(0, 3, 2637, 22)),
    "qwen_image_21": (Budget(8, 0, 1296, 0), Budget(0, 3, 1535, 14)),
    "ltx_video": (Budget(5, 0, 939, 3), Budget(0, 3, 2019, 18)),
    "ltx2": (Budget(11, 0, 2747, 18), Budget(8, 3, 6365, 56)),
    "wan_flf2v": (Budget(5, 0, 966, 0), Budget(0, 3, 2085, 14)),
    "flux3": (Budget(12, 1, 1336, 48), Budget(8, 3, 2623, 78)),
}
"""What a rollout of three denoising steps and an update on it take. An update waits for the groups
of its rows, for all of its numbers at once, and once in torch, where it clips the gradient. No
denoising step waits; a rollout of FLUX.3 does once, for the schedule that its block made. FLUX
copies the positions of its tokens in each forward pass, without waiting.
"""
COMPARED = ("sd3", "flux", "qwen_image", "wan", "wan_a14b", "flux2", "flux_kontext")
"""Families whose bytes are compared with those of the CPU, which takes a second run."""


def count_phase(device: PretendDevice) -> Budget:
    """Count what ran since the last call."""
    budget = Budget(
        device.host_to_device.total(),
        device.device_to_host.total() + device.synchronizations,
        device.kernels.total(),
        device.kernels["aten::_to_copy"],
    )
    for counter in (device.host_to_device, device.device_to_host, device.waits, device.kernels):
        counter.clear()
    return budget


def train_a_step(
    config: ModelConfig, name: str, device: PretendDevice | None = None
) -> tuple[dict[str, Any], dict[str, Budget]]:
    """(all that came out of a rollout, its pictures and an update on it; what each phase took)."""
    phases: dict[str, Budget] = {}
    stage = OnlineStageConfig.model_validate(
        small_stage({"sampler": {"steps": 3}, "algorithm": {"name": "flow_grpo"}})
    )
    model = load_model(Path(config.path or ""), config, weights_later=True)
    policy = Policy(model, LORA, 0)
    updater = PolicyUpdater(policy, stage)
    wanted = prompts(name)[:2]
    conditioning = build_prompt_lookup(model, wanted)(wanted)
    if device:
        count_phase(device)
    rollouts = generate_samples(
        model, conditioning, keys(wanted), stage.sampler, Plan(WINDOW, WINDOW)
    )
    if device:
        phases["rollout"] = count_phase(device)
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
        count_phase(device)
    metrics = updater.update_policy(batch, 2)
    if device:
        phases["update"] = count_phase(device)
    parameters = {key: value.detach().cpu() for key, value in policy.parameters.items()}
    return {"images": images, "metrics": metrics, "parameters": parameters}, phases


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "sd3" else pytest.mark.exhaustive) for name in BUDGETS],
)
def test_a_step_on_cuda(tiny_folder, name):
    settings: dict[str, Any] = {"height": 64, "width": 64, **few_tokens(name)}
    if name in FIRST_AND_LAST:
        settings["frames"] = 5
    config = ModelConfig(family=family(name), path=str(tiny_folder(name)), **settings)
    with pretend_cuda() as device:
        results, phases = train_a_step(config, name, device)
    for phase, budget in zip(("rollout", "update"), BUDGETS[name], strict=True):
        for field, limit in zip(Budget._fields, budget, strict=True):
            assert getattr(phases[phase], field) <= limit, f"{field} of the {phase}: {phases}"
    # The passes of the update have other rows than those of the rollout, and may round otherwise.
    assert results["metrics"]["ratio/deviation"] < 1e-6
    if name not in COMPARED:
        return
    expected, _ = train_a_step(config, name)
    assert results["metrics"] == expected["metrics"]
    assert np.array_equal(results["images"], expected["images"])
    for key, value in expected["parameters"].items():
        assert torch.equal(results["parameters"][key], value), key


def test_every_family_has_a_budget():
    assert set(BUDGETS) == set(EVERY)
