"""vLLM-Omni draws what diffusers draws: the same noise, log-probs, images and policy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm_omni_cases import KEYS

from ebbflow.flow.noise import generate_noise
from ebbflow.flow.windows import Plan
from ebbflow.recipe.choices import ParityConfig, SamplerConfig
from ebbflow.rollouts.parity import ParityError
from ebbflow.rollouts.vllm_omni import EngineError, VllmOmni

FAMILIES = ["sd3", "qwen_image"]
"""With classifier-free guidance."""
ALL_FAMILIES = [*FAMILIES, "flux", "flux2", "z_image", "wan", "qwen_image_edit"]
SDE = SamplerConfig(name="flow_sde", steps=6)
START = Plan((0, 1), (0, 1))
MIDDLE = Plan((2, 3), (2, 3), 0.5)
ROUNDING = 1e-6
"""Of a log-prob in float32."""
WHILE_DENOISING = 1e-4
"""Of latents with a standard deviation of about 2."""


def compare(both, conditioning, sampler, plan):
    """Both engines on the same samples; returns the latents."""
    found, images = both.engine.generate(conditioning, KEYS, sampler, plan)
    wanted, pictures = both.reference.generate(conditioning, KEYS, sampler, plan)
    assert wanted.latents.std() > 0.5
    assert (found.latents - wanted.latents).abs().max() < WHILE_DENOISING
    assert images.dtype == np.uint8
    assert np.abs(images.astype(int) - pictures).max() <= 1
    assert (found.trajectory is None) == (plan is None)
    if plan:
        mine = found.trajectory.list_columns()
        reference = wanted.trajectory.list_columns()
        for name in ("sigmas", "steps"):
            assert torch.equal(mine[name], reference[name])
        assert mine["states"].shape == reference["states"].shape
        assert (mine["states"] - reference["states"]).abs().max() < WHILE_DENOISING
        assert (mine["log_probs"] - reference["log_probs"]).abs().max() < ROUNDING
    return found.latents


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize(
    ("sampler", "plan"),
    [
        (SDE, START),
        (SDE, MIDDLE),
        (SamplerConfig(name="cps", steps=6), START),
        (SDE, None),
        (SamplerConfig(name="ode", steps=4), None),
        (SamplerConfig(name="dpm_solver", steps=4), None),
    ],
    ids=[
        "window at the start",
        "window in the middle, and a tail",
        "cps",
        "sde without a plan",
        "ode",
        "dpm_solver",
    ],
)
def test_the_engine_draws_what_the_reference_draws(both, family, guided, sampler, plan):
    both = both(family, "lora")
    both.change(seed=1)
    both.push()
    conditioning = both.conditioning if guided else both.conditioning.without_guidance()
    assert (conditioning.negative is not None) == guided
    compare(both, conditioning, sampler, plan)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_push_replaces_the_weights_of_the_one_before(both, family, train):
    both = both(family, train)
    drawn = {}
    for seed, scale in ((1, 1.0), (2, 1.0), (3, 0.0)):
        both.change(seed, scale)
        both.push()
        drawn[seed] = compare(both, both.conditioning, SDE, MIDDLE)
    with both.policy.use_copy("reference"):
        base = compare(both, both.conditioning, SDE, MIDDLE)
    assert torch.equal(drawn[3], base)
    assert all(
        (first - second).abs().max() > 0.05
        for first, second in ((drawn[1], drawn[2]), (drawn[1], base), (drawn[2], base))
    )


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_gate_passes_the_same_policy_and_refuses_one_that_was_not_pushed(
    both, family, through_the_gate
):
    both = both(family, "lora")
    both.change(seed=1)
    both.push()
    for sampler in (SDE, SamplerConfig(name="ode", steps=6)):
        found = through_the_gate(
            both.engine,
            both.policy,
            both.conditioning,
            KEYS,
            sampler,
            ParityConfig(samples=4),
        )
        assert found["parity/log_prob_max"] < ROUNDING
        assert found["parity/mean_shift"] < 1e-4
    both.change(seed=2)
    # Which of the two numbers refuses depends on how differently the steps show the other weights.
    with pytest.raises(ParityError, match=r"training has changed|steps are not those"):
        through_the_gate(
            both.engine,
            both.policy,
            both.conditioning,
            KEYS,
            SDE,
            ParityConfig(samples=4),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_of_the_noise_do_not_depend_on_the_batch(both, family):
    both = both(family, "lora")
    for size in (1, 2, 5):
        both.engine.micro_batch = size
        rollouts, _ = both.engine.generate(both.conditioning, KEYS, SDE, START)
        wanted = generate_noise(
            both.policy.model.latent_shape, KEYS.seed, KEYS.prompt_ids, KEYS.samples
        )
        assert torch.equal(rollouts.trajectory.latents[:, 0], wanted)


def test_weights_that_do_not_fit_are_refused_by_the_name_of_the_call(context_of):
    ctx = context_of("sd3", "lora")
    engine = VllmOmni(ctx, Path(ctx.recipe.model.path))
    wrong = {
        f"transformer_blocks.9.attn.to_q.lora_{side}.default.weight": torch.zeros(shape)
        for side, shape in SIDES.items()
    }
    with pytest.raises(
        EngineError, match=r"load_lora: .*could not take_lora: .*transformer_blocks\.9"
    ):
        engine.load(wrong)
    with pytest.raises(EngineError, match="was closed"):
        engine.load(wrong)


SIDES = {"A": (4, 32), "B": (32, 4)}


@pytest.mark.parametrize("family", FAMILIES)
def test_full_weights_must_be_whole(both, family):
    both = both(family, "full")
    weights = {name: parameter.detach() for name, parameter in both.policy.parameters.items()}
    del weights["transformer_blocks.0.attn.to_k.weight"]
    with pytest.raises(
        EngineError, match=r"load_weights: .*could not take_weights: .*elements were sent"
    ):
        both.engine.load(weights)


def test_a_killed_engine_is_told_with_its_exit_code(both):
    both = both("qwen_image", "lora")
    both.engine._process.kill()
    with pytest.raises(EngineError, match="generate: .*exit code -9"):
        both.engine.generate(both.conditioning, KEYS, SDE, START)


TRAINER = """
import sys, time
from pathlib import Path
from ebbflow.recipe import Recipe
from ebbflow.rollouts.vllm_omni import VllmOmni
from ebbflow.stage import StageContext
recipe = Recipe.model_validate_json(sys.argv[1])
engine = VllmOmni(StageContext(recipe, 0, 0), Path(recipe.model.path))
print(engine._process.pid, flush=True)
time.sleep(600)
"""


def test_the_engine_ends_with_a_trainer_that_was_killed(context_of):
    recipe = context_of("sd3", "lora").recipe.model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, recipe], stdout=subprocess.PIPE, text=True
    ) as trainer:
        engine = int(trainer.stdout.readline())
        os.kill(engine, 0)
        trainer.send_signal(signal.SIGKILL)
    for _ in range(300):
        if (
            not Path(f"/proc/{engine}").exists()
            or "(zombie)" in Path(f"/proc/{engine}/status").read_text()
        ):
            return
        time.sleep(0.1)
    pytest.fail(f"the engine, process {engine}, lives on")
