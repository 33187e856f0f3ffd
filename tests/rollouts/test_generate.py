"""The rollout engine against diffusers' own pipeline, and the records that training relies on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbflow.flow.noise import noise
from ebbflow.flow.transition import log_prob, sample, transition
from ebbflow.recipe.stages import Sampler
from ebbflow.rollouts.generate import SampleKeys, generate

TEXTS = ["ABCD", "ABCD", "WXYZ", "WXYZ", "QQQQ", "QQQQ", "MNOP"]
ODE, SDE = Sampler(name="ode", steps=5), Sampler(name="flow_sde", steps=5)


def test_the_ode_is_the_pipeline_of_diffusers(base_folder, open_pipeline, model, make_keys):
    conditioning, keys = model.encode(TEXTS), make_keys(7)
    for steps in (4, 10):
        ours = generate(model, conditioning, keys, Sampler(name="ode", steps=steps), micro_batch=3).latents
        theirs = open_pipeline(base_folder)(
            prompt_embeds=conditioning.embeds,
            pooled_prompt_embeds=conditioning.pooled,
            latents=noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples),
            sigmas=np.linspace(1, 1 / steps, steps).tolist(),
            num_inference_steps=steps,
            guidance_scale=1,
            height=16,
            width=32,
            output_type="latent",
        ).images
        assert ours.std() > 0.1
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("window", [None, range(1, 3)], ids=["no window", "window"])
def test_micro_batches_order_and_company_do_not_change_a_sample(model, make_keys, window):
    conditioning, keys = model.encode(TEXTS), make_keys(7)
    whole = generate(model, conditioning, keys, SDE, window, micro_batch=64)
    for size in (1, 3, 7):
        parts = generate(model, conditioning, keys, SDE, window, micro_batch=size)
        assert torch.allclose(parts.latents, whole.latents, rtol=0, atol=1e-5)
        if window:
            assert torch.allclose(parts.trajectory.latents, whole.trajectory.latents, rtol=0, atol=1e-5)
            assert torch.allclose(parts.trajectory.log_probs, whole.trajectory.log_probs, rtol=0, atol=1e-5)
    order = [6, 2, 0]
    some = generate(model, conditioning.rows(torch.tensor(order)), keys.take(np.array(order)), SDE, window)
    assert torch.allclose(some.latents, whole.latents[order], rtol=0, atol=1e-5)


def test_the_same_call_gives_the_same_bits_and_another_seed_other_ones(model, make_keys):
    conditioning = model.encode(TEXTS)
    first, again = (generate(model, conditioning, make_keys(7), SDE, range(2)).latents for _ in range(2))
    assert torch.equal(first, again)
    other = generate(model, conditioning, make_keys(7, seed=4), SDE, range(2)).latents
    assert (other - first).abs().flatten(1).max(1).values.min() > 0.1


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("window", [range(1), range(1, 4), range(4)], ids=str)
def test_the_window_records_the_steps_that_were_sampled(model, make_keys, name, window):
    sampler = Sampler(name=name, steps=5)
    conditioning, keys = model.encode(TEXTS), make_keys(7)
    rollouts = generate(model, conditioning, keys, sampler, window)
    record, sigmas = rollouts.trajectory, model.sigmas(5)
    assert record.steps.tolist() == list(window)
    assert torch.equal(record.sigmas, sigmas)
    assert record.latents.shape == (7, len(window) + 1, *model.latent_shape)
    assert record.log_probs.shape == (7, len(window))
    assert record.latents.dtype == record.log_probs.dtype == torch.float32

    def velocity(latents, step):
        with torch.no_grad():
            return model.velocity(latents, sigmas[step].expand(7), conditioning)

    latents = noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples)
    for step in range(window[0]):
        latents = latents + (sigmas[step + 1] - sigmas[step]) * velocity(latents, step)
    assert torch.allclose(record.latents[:, 0], latents, atol=1e-5)
    for place, step in enumerate(window):
        before, after = record.latents[:, place], record.latents[:, place + 1]
        move = transition(name, before, velocity(before, step), sigmas, step)
        z = noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, step + 1)
        assert torch.equal(sample(move, z), after)
        assert torch.equal(log_prob(move, after), record.log_probs[:, place])
    latents = record.latents[:, -1]
    for step in range(window[-1] + 1, 5):
        latents = latents + (sigmas[step + 1] - sigmas[step]) * velocity(latents, step)
    assert torch.allclose(rollouts.latents, latents, atol=1e-5)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "cps"])
def test_without_a_window_all_steps_but_the_last_are_stochastic_and_nothing_is_recorded(model, make_keys, name):
    conditioning, sampler = model.encode(TEXTS), Sampler(name=name, steps=5)
    rollouts = generate(model, conditioning, make_keys(7), sampler)
    assert rollouts.trajectory is None
    assert torch.equal(rollouts.latents, generate(model, conditioning, make_keys(7), sampler, range(4)).latents)
    assert not torch.allclose(rollouts.latents, generate(model, conditioning, make_keys(7), ODE).latents, atol=1e-2)


def test_little_noise_is_nearly_the_ode(model, make_keys):
    conditioning = model.encode(TEXTS)
    ode = generate(model, conditioning, make_keys(7), ODE).latents
    for name in ("flow_sde", "dance_sde", "cps"):
        sampler = Sampler(name=name, steps=5, eta=1e-5)
        assert torch.allclose(generate(model, conditioning, make_keys(7), sampler, range(4)).latents, ode, atol=1e-3)


def test_a_window_of_a_deterministic_sampler_is_an_error(model, make_keys):
    with pytest.raises(ValueError, match="no log-probability"):
        generate(model, model.encode(TEXTS), make_keys(7), ODE, range(1, 2))


def test_nothing_needs_a_gradient(model, make_keys):
    model.transformer.requires_grad_(True)
    rollouts = generate(model, model.encode(TEXTS), make_keys(7), SDE, range(2))
    assert not rollouts.latents.requires_grad
    assert not rollouts.trajectory.log_probs.requires_grad


def test_keys_by_slice_and_by_position():
    keys = SampleKeys(7, [4, 5, 6], [0, 1, 2])
    assert keys.rows(slice(1, 3)) == SampleKeys(7, [5, 6], [1, 2])
    assert keys.take(np.array([2, 0])) == SampleKeys(7, [6, 4], [2, 0])
    assert len(keys) == 3
