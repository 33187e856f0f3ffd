"""The gate in front of an engine: it measures what differs, and refuses with the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.gpu_sides import SIZES, ModelSize, build_random_model, generate_random_prompts
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.recipe.choices import ParityConfig, SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.rollouts.parity import ParityError, measure_parity, plan_parity_samples
from ebbflow.rollouts.step_comparison import EFFECT_TOLERANCE, MEASURABLE, ChangeEffect
from ebbflow.training.policy import Policy

TEXTS = ["ABCD", "EFGH", "IJKL", "MNOP", "QRST", "UVWX"]
SAMPLERS = [
    SamplerConfig(name=name, steps=5)
    for name in ("flow_sde", "dance_sde", "cps", "ode", "dpm_solver", "unipc")
]
PARITY = ParityConfig(samples=4)


class Other:
    """An engine of its own model; ``change`` is done to what it generates."""

    def __init__(self, model, change=lambda rollouts: rollouts):
        self.model = model
        self.change = change
        self.asked = []

    def generate(self, conditioning, keys, sampler, plan=None):
        self.asked.append((len(keys), sampler, plan))
        rollouts = self.change(generate_samples(self.model, conditioning, keys, sampler, plan))
        return rollouts, np.zeros((len(keys), 1, 1, 3), np.uint8)


@pytest.fixture
def policy(model):
    return Policy(model, PolicyConfig(train="full"), 0)


@pytest.fixture
def other(base_folder):
    return load_model(base_folder)


@pytest.fixture
def ask(through_the_gate):
    def measure(engine, policy, sampler=SAMPLERS[0], parity=PARITY, micro_batch=3):
        keys = SampleKeys(9, [3, 3, 5, 5, 8, 8], [0, 1, 0, 1, 0, 1])
        return through_the_gate(
            engine, policy, policy.model.encode_texts(TEXTS), keys, sampler, parity, micro_batch
        )

    return measure


def changed(**trajectory):
    """What replaces fields of a trajectory, each given as a function of what was there."""

    def change(rollouts):
        found = rollouts.trajectory
        new = {name: with_what(getattr(found, name)) for name, with_what in trajectory.items()}
        return replace(rollouts, trajectory=replace(found, **new))

    return change


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.name)
def test_the_same_network_passes_at_every_step_of_every_sampler(ask, policy, other, sampler):
    engine = Other(other)
    found = ask(engine, policy, sampler)
    ((count, used, plan),) = engine.asked
    assert count == 4
    assert used.steps == 5
    assert used.name == (sampler.name if sampler in SAMPLERS[:3] else "flow_sde")
    assert plan.stochastic == plan.trained == (0, 1, 2, 3)
    assert 0 <= found["parity/log_prob_mean"] <= found["parity/log_prob_max"] < 1e-6
    assert found["parity/mean_shift"] < 1e-4
    assert found["parity/worst_step"] in (0, 1, 2, 3)


def test_other_weights_are_refused_with_the_numbers(ask, policy, other):
    with torch.no_grad():
        for parameter in other.transformer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    accepted = ask(Other(other), policy, parity=ParityConfig(samples=4, max_shift=10.0))
    assert accepted["parity/mean_shift"] > 100 * accepted["parity/rounding_shift"]
    with pytest.raises(ParityError, match="parity.max_shift") as error:
        ask(Other(other), policy)
    for number in ("mean_shift", "rounding_shift"):
        assert f"{accepted[f'parity/{number}']:.2e}" in str(error.value)
    assert f"denoising step {accepted['parity/worst_step']:.0f}, prompt" in str(error.value)
    assert "4 samples at 4 steps" in str(error.value)


def test_log_probs_that_are_not_those_of_the_steps_are_refused_with_their_place(ask, policy, other):
    def change_one(log_probs):
        moved = log_probs.clone()
        moved[2, 1] -= 1e-4
        return moved

    with pytest.raises(ParityError, match="step 1, prompt 5, sample 0") as error:
        ask(Other(other, changed(log_probs=change_one)), policy)
    assert "differ from the training policy's by 1.0" in str(error.value)


def test_the_shift_of_the_means_is_in_standard_deviations(ask, policy, other):
    sampler = SamplerConfig(name="dance_sde", steps=5, eta=0.5)
    sigmas = policy.model.compute_sigmas(5)
    std = 0.5 * (sigmas[:-2] - sigmas[1:-1]).sqrt()

    def move_means(means):
        return means + 0.1 * std.view(1, -1, *[1] * (means.ndim - 2))

    engine = Other(other, changed(means=move_means))
    accepted = ask(engine, policy, sampler, ParityConfig(samples=4, max_shift=0.11))
    assert accepted["parity/mean_shift"] == pytest.approx(0.1, rel=1e-3)
    with pytest.raises(ParityError, match="means differ by 1.00e-01"):
        ask(engine, policy, sampler, ParityConfig(samples=4, max_shift=0.09))


@pytest.mark.parametrize("damaged", ["log_probs", "means"])
def test_numbers_that_are_none_are_refused(ask, policy, other, damaged):
    def damage(values):
        return values.index_fill(0, torch.tensor([1]), torch.nan)

    with pytest.raises(ParityError, match="prompt 3, sample 1.* by nan|by nan.*prompt 3, sample 1"):
        ask(Other(other, changed(**{damaged: damage})), policy)


def move_weights(policy, size, seed=0):
    """As an update does: every weight by the same length, in a direction of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += size * (torch.randn(parameter.shape, generator=generator).sign())


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_an_engine_without_the_weights_of_training_is_refused(ask, policy, other, size):
    move_weights(policy, size)
    with pytest.raises(ParityError, match=r"shows (0|-0)\.\d\d of what training has changed"):
        ask(Other(other), policy)


def test_the_share_of_the_weights_is_measured_once_they_differ(ask, policy, base_folder):
    """Half of a small change of the weights is half of the change of the steps."""
    engine_policy = Policy(load_model(base_folder), PolicyConfig(train="full"), 0)
    assert "parity/weights_effect" not in ask(Other(engine_policy.model), policy)
    move_weights(policy, 1e-5)
    move_weights(engine_policy, 1e-5)
    assert ask(Other(engine_policy.model), policy)["parity/weights_effect"] == pytest.approx(
        1, abs=0.01
    )
    with torch.no_grad():
        for name, parameter in engine_policy.parameters.items():
            parameter.lerp_(engine_policy.copies["reference"][name], 0.5)
    with pytest.raises(ParityError, match=r"shows 0\.5\d* of what training has changed"):
        ask(Other(engine_policy.model), policy)


def test_an_engine_in_bfloat16_shows_the_weights_of_a_policy_in_float32(policy):
    """It rounds exactly as the policy would in bfloat16, which shows as no further change."""
    move_weights(policy, 1e-4)
    conditioning = policy.model.encode_texts(TEXTS[:4])
    keys = SampleKeys(9, [3, 3, 5, 5], [0, 1, 0, 1])
    sampler, plan = plan_parity_samples(SamplerConfig(name="flow_sde", steps=11))
    rollouts = generate_samples(
        policy.model, conditioning, keys, sampler, plan, precision="bfloat16"
    )
    metrics = measure_parity(
        policy, rollouts.trajectory, conditioning, keys, sampler, PARITY, precision="bfloat16"
    )
    assert metrics["parity/mean_shift"] < 3 * metrics["parity/rounding_shift"]
    assert metrics["parity/weights_effect"] == pytest.approx(1, abs=0.1)


def test_samples_that_share_their_initial_noise_pass(through_the_gate, policy, other):
    keys = SampleKeys(9, [3, 3, 5, 5], [0, 1, 0, 1], sharing=[2])
    conditioning = policy.model.encode_texts(TEXTS[:4])
    assert (
        through_the_gate(Other(other), policy, conditioning, keys, SAMPLERS[0], PARITY, 3)[
            "parity/log_prob_max"
        ]
        < 1e-6
    )
    other_start = Other(other, changed(states=lambda states: states + 1))
    with pytest.raises(ParityError, match="starts from other noise"):
        through_the_gate(other_start, policy, conditioning, keys, SAMPLERS[0], PARITY, 3)


def test_other_noise_and_another_schedule_are_refused(ask, policy, other):
    def one_bit(latents):
        latents = latents.clone()
        latents[0, 0].view(-1).view(torch.int32)[0] ^= 1
        return latents

    with pytest.raises(ParityError, match="seed 9"):
        ask(Other(other, changed(states=one_bit)), policy)
    with pytest.raises(ParityError, match="sigmas"):
        ask(Other(other, changed(sigmas=lambda sigmas: sigmas * 0.99)), policy)


@pytest.mark.parametrize(("steps", "growth"), [(3, 1.0), (9, 1.0), (9, 2.0)])
def test_an_engine_with_all_weights_is_rarely_refused_for_few_or_unequal_steps(steps, growth):
    """Rounding moves the share by .1, which only the differences between the steps tell."""
    generator = torch.Generator().manual_seed(0)
    changes = torch.tensor([growth**step for step in range(steps)], dtype=torch.float64)
    num_refused = 0
    for _ in range(2000):
        noise = torch.randn(steps, generator=generator, dtype=torch.float64)
        errors = 0.1 * (changes * changes.sum()).sqrt() * noise
        effect = ChangeEffect(changes.tolist(), errors.tolist())
        tolerance = max(EFFECT_TOLERANCE, effect.uncertainty())
        num_refused += tolerance < MEASURABLE and abs(effect.share() - 1) > tolerance
    assert num_refused < 0.01 * 2000


LARGE = ModelSize(
    transformer=SIZES["tiny"].transformer
    | {"sample_size": 128, "in_channels": 16, "out_channels": 16, "pos_embed_max_size": 64},
    vae=SIZES["tiny"].vae | {"latent_channels": 16},
    resolution=1024,
    tokens=12,
    micro_batches=(2,),
    training_micro_batch=2,
    matrix=1,
)
"""A tiny network on the latents of an image of 1024 x 1024."""


@pytest.fixture(scope="module")
def updated_policy():
    """LoRA in bfloat16 after one update of AdamW at a learning rate of 1e-4."""
    torch.manual_seed(0)
    model = build_random_model(LARGE, torch.device("cpu"), "bfloat16")
    model.transformer.to(torch.bfloat16)
    for name, parameter in model.transformer.named_parameters():
        if "norm1" in name and name.endswith("linear.bias"):
            parameter.fill_(1.0)  # gates of new blocks are almost shut, those of trained ones open
    policy = Policy(model, PolicyConfig(train="lora", rank=32, alpha=64), 0)
    optimizer = torch.optim.AdamW(policy.parameters.values(), lr=1e-4)
    latents = torch.randn(1, *model.latent_shape)
    conditioning = generate_random_prompts(LARGE, 1, 1.0, latents.device, torch.bfloat16)
    predict(model, latents, torch.tensor([0.7]), conditioning).square().mean().backward()
    optimizer.step()
    return policy


def multiply_in_halves(inputs, weight, bias=None):
    """As ``functional.linear``, in another order of summation."""
    half = weight.shape[1] // 2
    product = inputs[..., :half].float() @ weight[:, :half].float().T
    product = product + inputs[..., half:].float() @ weight[:, half:].float().T
    product = product if bias is None else product + bias.float()
    return product.to(torch.bfloat16)


class OtherKernels:
    """An engine of the policy's network in bfloat16, with kernels of its own."""

    def __init__(self, policy, copy):
        self.policy = policy
        self.copy = copy

    def generate(self, conditioning, keys, sampler, plan):
        other_kernels = patch.object(functional, "linear", multiply_in_halves)
        with self.policy.use_copy(self.copy), other_kernels:
            return generate_samples(self.policy.model, conditioning, keys, sampler, plan), None


@pytest.mark.exhaustive
def test_a_large_latent_hides_no_missing_adapter_below_the_rounding_of_bfloat16(
    through_the_gate, updated_policy
):
    """D = 262,144: the first update moves the steps by less than rounding does."""
    conditioning = generate_random_prompts(LARGE, 3, 1.0, torch.device("cpu"), torch.bfloat16)

    def measure(copy):
        engine = OtherKernels(updated_policy, copy)
        sampler = SamplerConfig(name="flow_sde", steps=9)
        keys = SampleKeys(9, [1, 2, 3], [0, 0, 0])
        parity = ParityConfig(samples=3)
        return through_the_gate(engine, updated_policy, conditioning, keys, sampler, parity)

    assert math.prod(updated_policy.model.latent_shape) == 262_144
    metrics = measure("current")
    assert metrics["parity/mean_shift"] > 1e-4
    assert metrics["parity/log_prob_max"] < 1e-4
    with pytest.raises(ParityError, match="of what training has changed"):
        measure("reference")
