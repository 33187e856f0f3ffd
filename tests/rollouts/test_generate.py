"""The rollout engine against diffusers' own pipeline, the records that training relies on, and an
exact flow.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from ebbflow.flow.noise import SampleKeys, generate_noise, generate_shared_noise
from ebbflow.flow.sampler import (
    SolverHistory,
    compute_log_prob,
    compute_transition,
    sample_next_latents,
)
from ebbflow.flow.samplers.dpm_solver import SAMPLER as DPM_SOLVER
from ebbflow.flow.windows import Plan, count_states, shorten_schedule
from ebbflow.models import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate_samples

TEXTS = ["ABCD", "ABCD", "WXYZ", "WXYZ", "QQQQ", "QQQQ", "MNOP"]
ODE = SamplerConfig(name="ode", steps=5)
SDE = SamplerConfig(name="flow_sde", steps=5)
STOCHASTIC = ["flow_sde", "dance_sde", "cps"]
RECORDS = ["latents", "next_latents", "means", "log_probs"]
DATA_MEAN = 1.5
DATA_STD = 0.5


def window(*steps, tail=None):
    return Plan(steps, steps, tail, with_means=True)


class GaussianModel:
    """The exact velocity of data N(m, s^2), on 64 independent elements; counts its evaluations."""

    latent_shape = (1, 8, 8)
    precision = "float32"

    def __init__(self):
        self.evaluated_at = []

    def compute_sigmas(self, steps):
        return torch.linspace(1, 0, steps + 1)

    def predict_velocity(self, latents, sigma, conditioning):
        self.evaluated_at.append(sigma[0].item())
        return exact_velocity(latents, sigma[0])


def exact_velocity(x, sigma):
    """E[eps - x0 | x_sigma = x]."""
    residual = (x - (1 - sigma) * DATA_MEAN) / spread(sigma) ** 2
    return sigma * residual - (DATA_MEAN + (1 - sigma) * DATA_STD**2 * residual)


def spread(sigma):
    """Standard deviation of x_sigma."""
    return ((1 - sigma) ** 2 * DATA_STD**2 + sigma**2) ** 0.5


def nothing(count):
    return Conditioning({"embeds": torch.zeros(count, 1, 1)})


def euler(x, velocity, sigmas, steps):
    for step in steps:
        x = x + (sigmas[step + 1] - sigmas[step]) * velocity(x, step)
    return x


def test_the_ode_is_the_pipeline_of_diffusers(base_folder, open_pipeline, model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    for steps in (4, 10):
        ours = generate_samples(
            model, conditioning, keys, SamplerConfig(name="ode", steps=steps), micro_batch=3
        ).latents
        theirs = open_pipeline(base_folder)(
            prompt_embeds=conditioning["embeds"],
            pooled_prompt_embeds=conditioning["pooled"],
            latents=generate_noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples),
            sigmas=np.linspace(1, 1 / steps, steps).tolist(),
            num_inference_steps=steps,
            guidance_scale=1,
            height=16,
            width=32,
            output_type="latent",
        ).images
        assert ours.std() > 0.1
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "plan",
    [None, window(1, 2), window(1, tail=0.5), Plan((0, 1, 2, 3), (0, 3), with_means=True)],
    ids=str,
)
def test_micro_batches_order_and_company_do_not_change_a_sample(model, make_keys, plan):
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    whole = generate_samples(model, conditioning, keys, SDE, plan, micro_batch=64)
    for size in (1, 3, 7):
        parts = generate_samples(model, conditioning, keys, SDE, plan, micro_batch=size)
        assert torch.allclose(parts.latents, whole.latents, rtol=0, atol=1e-5)
        if plan:
            assert torch.equal(parts.trajectory.sigmas, whole.trajectory.sigmas)
            assert torch.equal(parts.trajectory.steps, whole.trajectory.steps)
            for name in RECORDS:
                assert torch.allclose(
                    getattr(parts.trajectory, name),
                    getattr(whole.trajectory, name),
                    rtol=0,
                    atol=1e-5,
                )
    order = [6, 2, 0]
    some = generate_samples(
        model,
        conditioning.select_rows(torch.tensor(order)),
        keys.select_samples(np.array(order)),
        SDE,
        plan,
    )
    assert torch.allclose(some.latents, whole.latents[order], rtol=0, atol=1e-5)


def test_the_same_call_gives_the_same_bits_and_another_seed_other_ones(model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    first, again = (
        generate_samples(model, conditioning, make_keys(7), SDE, window(0, 1)).latents
        for _ in range(2)
    )
    assert torch.equal(first, again)
    other = generate_samples(model, conditioning, make_keys(7, seed=4), SDE, window(0, 1)).latents
    assert (other - first).abs().flatten(1).max(1).values.min() > 0.1


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize(
    "plan",
    [
        window(0),
        window(1, 2, 3),
        window(0, 1, 2, 3),
        window(1, 3),
        Plan((0, 1, 2, 3), (1, 3), None, True),
    ],
    ids=str,
)
def test_the_trained_steps_are_recorded_as_they_were_sampled(model, make_keys, name, plan):
    sampler = SamplerConfig(name=name, steps=5)
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    rollouts = generate_samples(model, conditioning, keys, sampler, plan)
    record = rollouts.trajectory
    sigmas = model.compute_sigmas(5)
    assert record.steps.tolist() == list(plan.trained)
    assert torch.equal(record.sigmas, sigmas)
    assert record.log_probs.shape == (7, len(plan.trained))
    for index in RECORDS[:3]:
        assert getattr(record, index).shape == (7, len(plan.trained), *model.latent_shape)
    assert all(getattr(record, index).dtype == torch.float32 for index in RECORDS)

    latents = generate_noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples)
    for step in range(5):
        with torch.no_grad():
            velocity = model.predict_velocity(latents, sigmas[step].expand(7), conditioning)
        move = compute_transition(
            name if step in plan.stochastic else "ode", latents, velocity, sigmas, step
        )
        z = generate_noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, step + 1)
        after = sample_next_latents(move, z)
        if step in plan.trained:
            index = plan.trained.index(step)
            assert torch.equal(record.latents[:, index], latents)
            assert torch.equal(record.means[:, index], move.mean)
            assert torch.equal(record.next_latents[:, index], after)
            assert torch.equal(record.log_probs[:, index], compute_log_prob(move, after))
        latents = after
    assert torch.equal(rollouts.latents, latents)


def test_the_noise_of_a_step_is_generated_while_the_network_predicts(make_keys, monkeypatch):
    generated = {index: threading.Event() for index in range(5)}

    def generate_and_tell(shape, keys, index):
        noise = generate_shared_noise(shape, keys, index)
        generated[index].set()
        return noise

    class WaitingModel(GaussianModel):
        def predict_velocity(self, latents, sigma, conditioning):
            step = len(self.evaluated_at)
            if step < 4:
                assert generated[step + 1].wait(60), "the noise is generated after the prediction"
            return super().predict_velocity(latents, sigma, conditioning)

    monkeypatch.setattr("ebbflow.rollouts.generate.generate_shared_noise", generate_and_tell)
    generate_samples(WaitingModel(), nothing(7), make_keys(7), SDE)


@pytest.mark.parametrize(
    ("trained", "num_states"),
    [((0, 1, 2, 3), 5), ((1, 2), 3), ((0, 2), 4), ((0, 2, 3), 5)],
    ids=str,
)
def test_each_state_is_kept_once_and_means_only_where_they_are_asked_for(
    model, make_keys, trained, num_states
):
    conditioning = model.encode_texts(TEXTS)
    every = (0, 1, 2, 3)
    with_means, without = (
        generate_samples(
            model, conditioning, make_keys(7), SDE, Plan(every, trained, with_means=means)
        ).trajectory
        for means in (True, False)
    )
    assert without.states.shape[:2] == (7, num_states)
    assert count_states(trained) == num_states
    assert without.means is None
    for name in ("states", "log_probs", "latents", "next_latents"):
        assert torch.equal(getattr(without, name), getattr(with_means, name))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_without_a_plan_all_steps_but_the_last_are_stochastic_and_nothing_is_recorded(
    model, make_keys, name
):
    conditioning = model.encode_texts(TEXTS)
    sampler = SamplerConfig(name=name, steps=5)
    rollouts = generate_samples(model, conditioning, make_keys(7), sampler)
    assert rollouts.trajectory is None
    assert torch.equal(
        rollouts.latents,
        generate_samples(model, conditioning, make_keys(7), sampler, window(0, 1, 2, 3)).latents,
    )
    assert not torch.allclose(
        rollouts.latents,
        generate_samples(model, conditioning, make_keys(7), ODE).latents,
        atol=1e-2,
    )


def test_little_noise_is_nearly_the_ode(model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    ode = generate_samples(model, conditioning, make_keys(7), ODE).latents
    for name in STOCHASTIC:
        sampler = SamplerConfig(name=name, steps=5, eta=1e-5)
        assert torch.allclose(
            generate_samples(model, conditioning, make_keys(7), sampler).latents, ode, atol=1e-3
        )


@pytest.mark.parametrize("name", ["ode", "dpm_solver", "unipc"])
def test_a_plan_for_a_deterministic_sampler_is_an_error(model, make_keys, name):
    with pytest.raises(ValueError, match=f"{name}' has no log-probability"):
        generate_samples(
            model,
            model.encode_texts(TEXTS),
            make_keys(7),
            SamplerConfig(name=name, steps=5),
            window(1),
        )


def test_nothing_needs_a_gradient(model, make_keys):
    model.transformer.requires_grad_(True)
    rollouts = generate_samples(model, model.encode_texts(TEXTS), make_keys(7), SDE, window(0, 1))
    assert not rollouts.latents.requires_grad
    assert not any(getattr(rollouts.trajectory, name).requires_grad for name in RECORDS)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_images_of_the_whole_path_have_the_exact_moments_on_gaussian_data(name):
    count = 1500
    model = GaussianModel()
    sampler = SamplerConfig(name=name, steps=6)
    keys = SampleKeys(3, list(range(count)), [0] * count)
    images = generate_samples(model, nothing(count), keys, sampler, micro_batch=500).latents
    # The mean follows the data's under every sampler; the variance by x' = slope x + b z + offset.
    sigmas = model.compute_sigmas(6).double()
    variance = 1.0
    points = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for step in range(6):
        move = compute_transition(
            name if step < 5 else "ode", points, exact_velocity(points, sigmas[step]), sigmas, step
        )
        variance = (move.mean[1] - move.mean[0]).item() ** 2 * variance + move.std.item() ** 2
    elements = images.numel()
    assert abs(images.mean().item() - DATA_MEAN) < 4 * math.sqrt(variance / elements)
    assert abs(images.var().item() - variance) < 4 * variance * math.sqrt(2 / elements)


def test_dpm_solver_takes_every_step_and_needs_no_noise(model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    sigmas = model.compute_sigmas(6)
    rollouts = generate_samples(
        model, conditioning, keys, SamplerConfig(name="dpm_solver", steps=6)
    )
    assert rollouts.trajectory is None
    latents = generate_noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples)
    history = None
    for step in range(6):
        with torch.no_grad():
            velocity = model.predict_velocity(latents, sigmas[step].expand(7), conditioning)
        latents, history = DPM_SOLVER.advance(latents, velocity, sigmas, step, history)
    assert torch.equal(rollouts.latents, latents)


def test_dpm_solver_ends_nearer_to_the_exact_flow_than_the_ode_with_as_many_evaluations(make_keys):
    keys = make_keys(40)
    exact = DATA_MEAN + DATA_STD * generate_noise(
        GaussianModel.latent_shape, keys.seed, keys.prompt_ids, keys.samples
    )

    def error(name):
        model = GaussianModel()
        images = generate_samples(
            model, nothing(40), keys, SamplerConfig(name=name, steps=10)
        ).latents
        assert len(model.evaluated_at) == 10
        return (images - exact).pow(2).mean().sqrt()

    assert error("dpm_solver") < error("ode") / 1.3
    assert error("unipc") < error("dpm_solver")


@pytest.mark.parametrize(
    ("plan", "tail_steps"),
    [
        (window(0, 1, 2, 3, tail=0.4), 9),  # MixGRPO-Flash: 21 steps are left, .4 of them are 8.4
        (window(0, 1, 2, 3, tail=0.2), 5),  # Flash*
        (window(9, 10, tail=0.5), 7),
        (window(0, tail=0.001), 1),
        (window(22, 23, tail=0.9), 1),
    ],
    ids=str,
)
def test_a_tail_is_shorter_and_leaves_the_window_as_it_is(make_keys, plan, tail_steps):
    sampler = SamplerConfig(name="flow_sde", steps=25)
    keys = make_keys(6)
    end = plan.stochastic[-1] + 1
    slow = GaussianModel()
    fast = GaussianModel()
    full = generate_samples(slow, nothing(6), keys, sampler, window(*plan.trained))
    short = generate_samples(fast, nothing(6), keys, sampler, plan)
    for name in ("steps", *RECORDS):
        assert torch.equal(getattr(short.trajectory, name), getattr(full.trajectory, name))
    sigmas = slow.compute_sigmas(25)
    assert torch.equal(
        short.trajectory.sigmas,
        torch.cat([sigmas[:end], shorten_schedule(sigmas[end:], plan.tail)]),
    )
    assert torch.equal(short.trajectory.sigmas[1], sigmas[1])
    assert fast.evaluated_at == short.trajectory.sigmas[:-1].tolist()
    assert len(slow.evaluated_at) == 25
    assert len(fast.evaluated_at) == end + tail_steps


def test_samples_that_share_their_start_have_one_initial_noise_and_their_own_later_noise(
    model, make_keys
):
    conditioning = model.encode_texts(TEXTS[:6])
    keys = SampleKeys(3, [5, 5, 5, 5, 9, 9], [4, 5, 6, 7, 4, 6])
    shared = generate_samples(
        model, conditioning, replace(keys, sharing=[2]), SDE, window(0, 1)
    ).trajectory.latents[:, 0]
    apart = generate_samples(model, conditioning, keys, SDE, window(0, 1)).trajectory.latents[:, 0]
    assert torch.equal(shared, apart[[0, 0, 2, 2, 4, 5]])
    assert not torch.equal(apart[0], apart[1])


def test_a_shared_start_leaves_the_noise_of_the_steps_alone(model, make_keys):
    conditioning = model.encode_texts([TEXTS[0]] * 4)
    keys = SampleKeys(3, [5] * 4, [0, 1, 2, 3])
    record = generate_samples(
        model, conditioning, replace(keys, sharing=[4]), SDE, window(0, 1)
    ).trajectory
    assert torch.equal(record.latents[0, 0], record.latents[3, 0])
    drawn = (record.next_latents[:, 0] - record.means[:, 0]).flatten(1)
    own = generate_noise(model.latent_shape, 3, [5] * 4, [0, 1, 2, 3], step=1).flatten(1)
    assert torch.nn.functional.cosine_similarity(drawn, own).min() > 0.999


def test_after_the_window_the_tail_is_dpm_solver_with_the_history_of_the_window(model, make_keys):
    """As MixGRPO's code has it: with the clean prediction of the last stochastic step, the tail
    begins at second order.
    """
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    rollouts = generate_samples(
        model, conditioning, keys, SamplerConfig(name="cps", steps=12), window(1, 2, tail=0.5)
    )
    sigmas = rollouts.trajectory.sigmas
    record = rollouts.trajectory
    latents = rollouts.trajectory.next_latents[:, -1]
    with torch.no_grad():
        last = record.latents[:, -1]
        velocity = model.predict_velocity(last, sigmas[2].expand(7), conditioning)
    history = SolverHistory(last, clean=last - sigmas[2] * velocity)
    for step in range(3, len(sigmas) - 1):
        with torch.no_grad():
            velocity = model.predict_velocity(latents, sigmas[step].expand(7), conditioning)
        latents, history = DPM_SOLVER.advance(latents, velocity, sigmas, step, history)
    assert torch.equal(rollouts.latents, latents)


@pytest.mark.parametrize("tail", [0.4, 0.2])
def test_a_tail_ends_close_to_where_all_the_steps_end(make_keys, tail):
    sampler = SamplerConfig(name="flow_sde", steps=25)
    keys = make_keys(40)
    model = GaussianModel()
    full = generate_samples(model, nothing(40), keys, sampler, window(0, 1, 2, 3)).latents
    short = generate_samples(model, nothing(40), keys, sampler, window(0, 1, 2, 3, tail=tail))
    sigmas = short.trajectory.sigmas
    entry = short.trajectory.next_latents[:, -1]
    exact = DATA_MEAN + DATA_STD * (entry - (1 - sigmas[4]) * DATA_MEAN) / spread(sigmas[4])

    def far(images, goal):
        return (images - goal).pow(2).mean().sqrt()

    assert far(short.latents, full) < 0.1 * DATA_STD
    by_euler = euler(
        entry, lambda x, step: exact_velocity(x, sigmas[step]), sigmas, range(4, len(sigmas) - 1)
    )
    assert far(short.latents, exact) < far(by_euler, exact) / 2


def test_a_tail_changes_the_images_of_the_network_little(model, make_keys):
    sampler = SamplerConfig(name="flow_sde", steps=25)
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    full = generate_samples(model, conditioning, keys, sampler, window(0, 1, 2, 3)).latents
    short = generate_samples(
        model, conditioning, keys, sampler, window(0, 1, 2, 3, tail=0.4)
    ).latents
    assert 0 < (short - full).pow(2).mean().sqrt() < 0.05 * full.std()
    assert (short - full).abs().max() < 0.2 * full.std()


def test_bfloat16_is_the_networks_alone_and_moves_log_probs_a_little(model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    sigmas = model.compute_sigmas(5)
    rollouts = generate_samples(
        model, conditioning, keys, SDE, window(0, 1, 2, 3), precision="bfloat16"
    )
    record = rollouts.trajectory
    assert rollouts.latents.dtype == torch.float32
    assert all(getattr(record, name).dtype == torch.float32 for name in RECORDS)
    assert all(weight.dtype == torch.float32 for weight in model.transformer.parameters())
    for index, step in enumerate(record.steps.tolist()):
        before = record.latents[:, index]
        after = record.next_latents[:, index]
        with torch.no_grad():
            velocity = model.predict_velocity(before, sigmas[step].expand(7), conditioning)
        move = compute_transition("flow_sde", before, velocity, sigmas, step)
        # The record is consistent in itself: its log-prob is the density of its own mean, not of
        # the float32 one.
        z = generate_noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, step + 1)
        assert torch.equal(record.means[:, index] + move.std * z, after)
        own = (
            torch.distributions.Normal(record.means[:, index], move.std)
            .log_prob(after)
            .flatten(1)
            .mean(1)
        )
        assert torch.allclose(record.log_probs[:, index], own, rtol=0, atol=1e-5)
        assert 0 < (record.means[:, index] - move.mean).abs().max() < 0.02
        difference = (record.log_probs[:, index] - compute_log_prob(move, after)).abs()
        assert 0 < difference.max() < 2e-3


def test_bfloat16_images_are_close_to_those_of_float32(model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    keys = make_keys(7)
    for sampler in (ODE, SDE, SamplerConfig(name="dpm_solver", steps=5)):
        full, low = (
            generate_samples(model, conditioning, keys, sampler, precision=name).latents
            for name in ("float32", "bfloat16")
        )
        assert 0 < (full - low).abs().max() < 0.05


def test_keys_by_slice_and_by_position():
    keys = SampleKeys(7, [4, 5, 6], [0, 1, 2])
    assert keys.select_samples(slice(1, 3)) == SampleKeys(7, [5, 6], [1, 2])
    assert keys.select_samples(np.array([2, 0])) == SampleKeys(7, [6, 4], [2, 0])
    assert len(keys) == 3
