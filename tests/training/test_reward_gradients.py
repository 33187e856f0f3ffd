"""The gradient of the reward through the last steps of the sampler: against a sampler written by
hand, and finite differences.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbflow.algorithms.base import GradientRows
from ebbflow.algorithms.built_in import draft, refl
from ebbflow.algorithms.built_in.draft import DRaFTConfig
from ebbflow.algorithms.built_in.refl import ReFLConfig
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.passes import RowCounts
from ebbflow.training.policy import Policy
from ebbflow.training.reward_gradients import build_gradient_batch
from ebbflow.training.update import PolicyUpdater

STEPS = 4
COUNT = 3
TEXTS = ["ABCD", "EFGH", "IJKL"]
KEYS = SampleKeys(11, [0, 1, 2], [0, 0, 1])
PROMPTS = [Prompt(index, text, "", None, "", "train", "{}") for index, text in enumerate(TEXTS)]


def waves(images, prompts):
    """A reward that is smooth in the pixels, no sum over them, and another one for each prompt."""
    weight = torch.tensor([prompt.prompt_id + 1.0 for prompt in prompts])
    return weight * torch.sin(3 * images.mean((1, 2, 3))) + (images**2).mean((1, 2, 3))


def make(base_folder, name, first_step, passes=1, **hyper):
    """(updater, its batch) of rows for ``PROMPTS``; plain ascent of the mean reward with a rate of
    1.
    """
    stage = {
        "algorithm": {"name": name, **hyper},
        "sampler": {"steps": STEPS},
        "reference": {"weight": 0.0},
    }
    config = OnlineStageConfig.model_validate(stage | {"optimizer": {"max_grad_norm": 1e9}})
    model = load_model(base_folder)
    policy = Policy(model, PolicyConfig(), 0)
    updater = PolicyUpdater(
        policy, config, optimizer=torch.optim.SGD(policy.parameters.values(), 1.0)
    )
    samples = (model.encode_texts(TEXTS), torch.zeros(COUNT), KEYS, PROMPTS)
    score = lambda latents, prompts, decode: waves(decode(latents), prompts)  # noqa: E731
    batch = build_gradient_batch(
        model,
        *samples,
        updater.sampler_sigmas,
        first_step,
        config.hyper_parameters.steps_with_gradient,
        score,
        passes,
    )
    return updater, batch


def by_hand(base_folder, first_step, jump=False):
    """(rewards with gradient, policy) of Euler's steps, without checkpoints; ``jump``: to the end
    from the first of them.
    """
    model = load_model(base_folder)
    policy = Policy(model, PolicyConfig(), 0)
    conditioning = model.encode_texts(TEXTS)
    sigmas = model.compute_sigmas(STEPS)
    latents = generate_initial_noise(model.latent_shape, KEYS)
    for step in range(first_step + 1 if jump else STEPS):
        with torch.set_grad_enabled(step >= first_step):
            velocity = predict(model, latents, sigmas[step].expand(COUNT), conditioning)
        end = 0 if jump and step == first_step else sigmas[step + 1]
        latents = latents + (end - sigmas[step]) * velocity
    return waves(model.decode_with_gradient(latents), PROMPTS), policy


def moves(updater, batch, passes):
    """(metrics of an update, how far it moved each parameter)."""
    before = {name: value.detach().clone() for name, value in updater.policy.parameters.items()}
    metrics = updater.update_policy(batch, passes)
    return metrics, {
        name: value.detach() - before[name] for name, value in updater.policy.parameters.items()
    }


CASES = [
    ("draft", STEPS - 1, {}),
    ("draft", 1, {"last_steps": 3}),
    ("draft", 0, {"last_steps": STEPS}),
]
CASES += [("refl", 2, {"target": None, "weight": 1.0})]


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(
    ("name", "first_step", "hyper"), CASES, ids=["draft 1", "draft 3", "draft all", "refl"]
)
def test_the_gradient_is_that_of_a_sampler_written_by_hand(
    base_folder, name, first_step, hyper, passes
):
    metrics, moved = moves(*make(base_folder, name, first_step, passes, **hyper), passes)
    rewards, policy = by_hand(base_folder, first_step, jump=name == "refl")
    rewards.mean().backward()
    assert metrics[f"{name}/reward"] == pytest.approx(rewards.mean().item(), rel=1e-5)
    assert max(value.abs().max() for value in moved.values()) > 1e-4
    for key, parameter in policy.parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(moved[key], expected, rtol=1e-3, atol=2e-6)


def test_the_gradient_through_all_steps_is_that_of_finite_differences(base_folder):
    _, moved = moves(*make(base_folder, "draft", 0, last_steps=STEPS), 1)
    norm = torch.sqrt(sum((value.double() ** 2).sum() for value in moved.values())).item()
    size = 1e-2
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            model = load_model(base_folder)
            policy = Policy(model, PolicyConfig(), 0)
            for key, parameter in policy.parameters.items():
                parameter += sign * size / norm * moved[key]
            latents = generate_samples(
                model, model.encode_texts(TEXTS), KEYS, SamplerConfig(name="ode", steps=STEPS)
            ).latents
            values.append(waves(model.decode_with_gradient(latents), PROMPTS).mean().item())
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(norm, rel=0.02)


def test_every_step_with_gradient_is_repeated_instead_of_kept(base_folder):
    updater, batch = make(base_folder, "draft", 1, last_steps=3)
    calls = []
    updater.policy.model.transformer.register_forward_pre_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    assert batch.inputs.checkpointed
    counts = RowCounts(total=COUNT, measured=COUNT, inverse=0)
    updater._run_passes(batch, [slice(0, COUNT)], counts, {})
    assert calls.count(True) == 6  # three forward, three again
    assert calls.count(False) == 1  # of the base model, for the drift
    _, once = make(base_folder, "refl", 3)
    assert not once.inputs.checkpointed


def test_a_row_starts_where_the_sampler_gets_to(base_folder):
    _, batch = make(base_folder, "draft", 2, passes=3, last_steps=2)
    model = load_model(base_folder)
    latents = generate_initial_noise(model.latent_shape, KEYS)
    sigmas = model.compute_sigmas(STEPS)
    with torch.no_grad():
        for step in range(2):
            velocity = predict(
                model, latents, sigmas[step].expand(COUNT), model.encode_texts(TEXTS)
            )
            latents = latents + (sigmas[step + 1] - sigmas[step]) * velocity
        expected = generate_samples(
            model, model.encode_texts(TEXTS), KEYS, SamplerConfig(name="ode", steps=STEPS)
        ).latents
        rows = batch.build_rows(
            slice(0, COUNT), predict(model, *batch.inputs.model_arguments(slice(0, COUNT))), {}
        )
        torch.testing.assert_close(rows.denoise(rows.velocity), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.inputs.latents, latents, rtol=1e-4, atol=1e-5)
    assert batch.inputs.sigma.tolist() == [sigmas[2].item()] * COUNT
    assert batch.describe_row(1).startswith("prompt 1, sample 0, denoising step 2 (sigma ")


def linear_rows(sigma, next_sigma):
    """(rows of one step to ``next_sigma`` and of a linear reward, its coefficients, the
    velocity)."""
    generator = torch.Generator().manual_seed(0)
    latents, velocity, weights = (
        torch.randn(3, 2, 2, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    velocity.requires_grad_()
    rows = GradientRows(
        latents=latents,
        sigma=torch.full((3,), sigma, dtype=torch.float64),
        velocity=velocity,
        denoise=lambda v: latents + (next_sigma - sigma) * v,
        reward=lambda clean: (weights * clean).sum((1, 2)),
        copies={},
        advantage=torch.zeros(3),
    )
    return rows, weights, velocity


def test_losses_are_their_closed_forms():
    rows, weights, velocity = linear_rows(0.3, 0.1)
    loss, metrics = draft.compute_loss(rows, DRaFTConfig())
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    torch.testing.assert_close(gradient, 0.2 * weights)
    torch.testing.assert_close(loss, -metrics["draft/reward"])

    loss, metrics = refl.compute_loss(rows, ReFLConfig(target=None, weight=0.5))
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    torch.testing.assert_close(gradient, 0.5 * 0.3 * weights)
    rewards = metrics["refl/reward"].detach()
    torch.testing.assert_close(
        rewards, (weights * (rows.latents - 0.3 * velocity)).sum((1, 2)).detach()
    )

    target = rewards.sort().values[1].item() + 1e-9
    loss, metrics = refl.compute_loss(rows, ReFLConfig(target=target, weight=2.0))
    torch.testing.assert_close(loss.detach(), 2 * (target - rewards).clamp_min(0))
    assert metrics["refl/active"].sum() == 2
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    assert (gradient[rewards > target] == 0).all()


def test_refl_draws_its_step_from_the_last_ones():
    draw = np.random.default_rng(0)
    assert {ReFLConfig().first_step(40, draw) for _ in range(400)} == set(range(30, 40))
    assert {ReFLConfig(last=1.0).first_step(4, draw) for _ in range(100)} == {0, 1, 2, 3}
    assert {ReFLConfig(last=0.01).first_step(4, draw) for _ in range(20)} == {3}
    assert DRaFTConfig(last_steps=3).first_step(10, draw) == 7
