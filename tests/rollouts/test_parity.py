"""The gate in front of an engine: it measures what differs, and refuses with the numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.recipe.choices import ParityConfig, SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.rollouts.parity import ParityError, compute_parity_bar
from ebbflow.training.policy import Policy

TEXTS = ["ABCD", "EFGH", "IJKL", "MNOP", "QRST", "UVWX"]
SAMPLERS = [
    SamplerConfig(name=name, steps=5)
    for name in ("flow_sde", "dance_sde", "cps", "ode", "dpm_solver", "unipc")
]
PARITY = ParityConfig(samples=4, bar=1e-6)


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
    found = ask(Other(other), policy, parity=ParityConfig(samples=4, bar=1.0))
    assert found["parity/log_prob_max"] > 1e-5
    with pytest.raises(ParityError) as error:
        ask(Other(other), policy)
    for number in (
        found["parity/log_prob_max"],
        found["parity/log_prob_mean"],
        found["parity/mean_shift"],
        1e-6,
    ):
        assert f"{number:.2e}" in str(error.value)
    assert f"denoising step {found['parity/worst_step']:.0f}, prompt" in str(error.value)
    assert "4 samples at 4 steps" in str(error.value)


def test_the_numbers_are_those_of_the_difference(ask, policy, other):
    def at_one_place(log_probs):
        moved = log_probs.clone()
        moved[2, 1] -= 0.25
        return moved

    found = ask(
        Other(other, changed(log_probs=at_one_place)),
        policy,
        parity=ParityConfig(samples=4, bar=0.3),
    )
    assert found["parity/log_prob_max"] == pytest.approx(0.25, abs=1e-5)
    assert found["parity/log_prob_mean"] == pytest.approx(0.25 / 16, abs=1e-5)
    assert found["parity/worst_step"] == 1
    with pytest.raises(ParityError, match=r"2\.50e-01 \(denoising step 1, prompt 5, sample 0\)"):
        ask(Other(other, changed(log_probs=at_one_place)), policy)


def test_the_shift_of_the_means_is_in_standard_deviations(ask, policy, other):
    sampler = SamplerConfig(name="dance_sde", steps=5, eta=0.5)
    sigmas = policy.model.compute_sigmas(5)
    std = 0.5 * (sigmas[:-2] - sigmas[1:-1]).sqrt()

    def moved(means):
        return means + 0.1 * std.view(1, -1, *[1] * (means.ndim - 2))

    found = ask(Other(other, changed(means=moved)), policy, sampler)
    assert found["parity/mean_shift"] == pytest.approx(0.1, rel=1e-3)


def test_log_probs_that_are_no_numbers_are_refused(ask, policy, other):
    with pytest.raises(ParityError, match="differ by up to nan"):
        ask(
            Other(
                other,
                changed(
                    log_probs=lambda values: values.index_fill(0, torch.tensor([1]), torch.nan)
                ),
            ),
            policy,
        )


def test_samples_that_share_their_initial_noise_pass(through_the_gate, policy, other):
    keys = SampleKeys(9, [3, 3, 5, 5], [0, 1, 0, 1], sharing=[2])
    conditioning = policy.model.encode_texts(TEXTS[:4])
    assert (
        through_the_gate(Other(other), policy, conditioning, keys, SAMPLERS[0], PARITY, 3)[
            "parity/log_prob_max"
        ]
        < 1e-6
    )
    other_start = Other(other, changed(latents=lambda latents: latents + 1))
    with pytest.raises(ParityError, match="starts from other noise"):
        through_the_gate(other_start, policy, conditioning, keys, SAMPLERS[0], PARITY, 3)


def test_other_noise_and_another_schedule_are_refused(ask, policy, other):
    def one_bit(latents):
        latents = latents.clone()
        latents[0, 0].view(-1).view(torch.int32)[0] ^= 1
        return latents

    with pytest.raises(ParityError, match="seed 9"):
        ask(Other(other, changed(latents=one_bit)), policy)
    with pytest.raises(ParityError, match="sigmas"):
        ask(Other(other, changed(sigmas=lambda sigmas: sigmas * 0.99)), policy)


def off_by(deviation):
    """What adds N(0, deviation^2) to every log-prob."""
    draw = torch.Generator().manual_seed(0)
    return changed(
        log_probs=lambda values: values + deviation * torch.randn(values.shape, generator=draw)
    )


@pytest.mark.parametrize(
    ("clip_range", "passes"), [(1e-2, True), (1e-3, True), (1e-4, False), (2e-6, False)]
)
def test_an_engine_may_be_off_by_the_clip_range(ask, policy, other, clip_range, passes):
    """Log-probs that are off by 2e-4 leave 31 % of the terms without a gradient at a clip range of
    1e-4, and none at 1e-3.
    """
    stage = OnlineStageConfig.model_validate(
        {"algorithm": {"name": "flow_grpo", "clip_range": clip_range}}
    )
    bar = compute_parity_bar(stage, dims=512)
    engine = Other(other, off_by(2e-4))
    parity = ParityConfig(samples=4, bar=bar)
    if passes:
        assert 2e-4 < ask(engine, policy, parity=parity)["parity/log_prob_max"] < bar
    else:
        with pytest.raises(ParityError, match=f"parity.bar is {clip_range:.2e}"):
            ask(engine, policy, parity=parity)


@pytest.mark.parametrize(
    ("stage", "bar"),
    [
        ({"algorithm": {"name": "grpo_guard", "clip_range": 2e-6}}, 2e-6),
        ({"algorithm": {"name": "flow_dppo", "divergence_limit": 1e-5}}, (2e-5 / 512) ** 0.5),
        ({"algorithm": {"name": "distillation", "teacher": "elsewhere"}}, 1e-3),
        ({"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode"}}, 1e-3),
        ({"algorithm": {"name": "grpo_guard"}, "parity": {"bar": 0.5}}, 0.5),
    ],
)
def test_the_bar_follows_the_algorithm_unless_given(stage, bar):
    stage = OnlineStageConfig.model_validate({"engine": "vllm_omni", **stage})
    assert compute_parity_bar(stage, dims=512) == pytest.approx(bar)
