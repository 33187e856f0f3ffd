"""SRPO and Direct-Align: against the published recovery written by hand, closed forms, and a tiny
CLIP that reads the words.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ebbflow.algorithms.base import DirectAlignRows
from ebbflow.algorithms.built_in import srpo
from ebbflow.algorithms.built_in.srpo import SRPOConfig
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys, generate_initial_noise
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.recipe.algorithms import DirectAlignConfig
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rewards.combine import load_reward
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.direct_align import build_direct_align_batch
from ebbflow.training.policy import Policy
from ebbflow.training.trial import try_loss
from ebbflow.training.update import PolicyUpdater
from tests.rewards.network_cases import make_reward

COUNT = 3
TEXTS = ["ABCD", "EFGH", "IJKL"]
KEYS = SampleKeys(11, [0, 1, 2], [0, 0, 1])
PROMPTS = [Prompt(index, text, "", None, "", "train", "{}") for index, text in enumerate(TEXTS)]
WORDS = {"positive_words": ["Good", "Better"], "negative_words": ["Bad", "Worse", "Worst"]}


def waves(images, prompts):
    """A reward that is smooth in the pixels, and another one for each text."""
    weight = torch.tensor([1 + len(prompt.prompt) / 7 for prompt in prompts])
    return weight * torch.sin(3 * images.mean((1, 2, 3))) + (images**2).mean((1, 2, 3))


def make(base_folder, score=waves, update=0, keys=KEYS, lr=1.0, **hyper):
    """(updater, its batch) of rows for ``PROMPTS``; plain descent with a rate."""
    stage = {
        "algorithm": {"name": "srpo", **hyper},
        "sampler": {"steps": 4},
        "reference": {"weight": 0.0},
    }
    config = OnlineStageConfig.model_validate(stage | {"optimizer": {"max_grad_norm": 1e9}})
    model = load_model(base_folder)
    policy = Policy(model, PolicyConfig(), 0)
    updater = PolicyUpdater(
        policy, config, optimizer=torch.optim.SGD(policy.parameters.values(), lr)
    )
    clean = (
        generate_initial_noise(model.latent_shape, SampleKeys(5, keys.prompt_ids, keys.samples)) / 2
    )
    samples = (
        clean,
        model.encode_texts(TEXTS).select_rows(torch.tensor(keys.prompt_ids)),
        torch.zeros(len(keys)),
        keys,
    )
    prompts = [PROMPTS[index] for index in keys.prompt_ids]
    scored = lambda latents, prompts, decode: score(decode(latents), prompts)  # noqa: E731
    return updater, build_direct_align_batch(
        model, *samples, prompts, config.hyper_parameters, update, scored
    )


def by_hand(base_folder, batch, config, words):
    """(loss with gradient, policy), row by row, with the recovery as the published code has it."""
    model = load_model(base_folder)
    policy = Policy(model, PolicyConfig(), 0)
    losses = []
    for row in range(2 * COUNT):
        prompt = PROMPTS[row // 2]
        inversion = row % 2
        clean = batch.clean[row]
        noise = generate_initial_noise(model.latent_shape, KEYS)[row // 2]
        start = batch.inputs.sigma[row]
        end = batch.end_sigma[row]
        noisy = start * noise + (1 - start) * clean
        velocity = predict(model, noisy[None], start[None], model.encode_texts([prompt.prompt]))[0]
        image = model.decode_with_gradient(
            ((noisy + (end - start) * velocity - end * noise) / (1 - end))[None]
        )
        ends = config.inversion_discount if inversion else config.discount
        discount = np.interp(min(start, end), [config.min_sigma, config.max_sigma], ends)
        texts = [f"{word}. {prompt.prompt}" for word in (reversed(words) if inversion else words)]
        raised, lowered = (
            waves(image, [Prompt(0, text, "", None, "", "train", "{}")]) for text in texts
        )
        losses.append((config.target - (1 + discount) * raised + lowered).clamp_min(0))
    return torch.cat(losses), policy


@pytest.mark.parametrize("passes", [1, 4])
def test_the_gradient_is_that_of_the_published_recovery(base_folder, passes):
    updater, batch = make(base_folder, update=3, target=9, **WORDS)
    before = {name: value.detach().clone() for name, value in updater.policy.parameters.items()}
    metrics = updater.update_policy(batch, passes)
    losses, policy = by_hand(base_folder, batch, updater.hyper, ["Better", "Bad"])
    losses.mean().backward()
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["srpo/active"] == 1
    moved = {
        name: before[name] - value.detach() for name, value in updater.policy.parameters.items()
    }
    assert max(value.abs().max() for value in moved.values()) > 1e-5
    for key, parameter in policy.parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(moved[key], expected, rtol=1e-3, atol=2e-7)


def test_rows_end_in_the_band_and_start_on_both_sides(base_folder):
    keys = SampleKeys(3, [0, 1, 2] * 20, list(range(60)))
    _, batch = make(base_folder, keys=keys, min_sigma=0.2, max_sigma=0.7, jump=0.3)
    start = batch.inputs.sigma.view(-1, 2)
    end = batch.end_sigma.view(-1, 2)
    assert (start[:, 0] > end[:, 0]).all()
    assert (start[:, 1] < end[:, 1]).all()
    torch.testing.assert_close(start[:, 0] - end[:, 0], end[:, 1] - start[:, 1])
    torch.testing.assert_close(end[:, 0], end[:, 1])
    jump = torch.minimum(end[:, 0] - 0.2, 0.7 - end[:, 0]).clamp_max(0.3 * 0.5)
    torch.testing.assert_close(start[:, 0] - end[:, 0], jump)
    assert start.min() >= 0.2 - 1e-6
    assert start.max() <= 0.7 + 1e-6
    assert end[:, 0].quantile(0.5).item() == pytest.approx(0.45, abs=0.1)
    assert batch.group_index.tolist() == list(range(120))
    assert list(batch.keys.samples) == [row // 2 for row in range(120)]
    assert batch.describe_row(1).startswith(
        f"prompt 0, sample 0, step from sigma {start[0, 1]:.4f} to {end[0, 1]:.4f}"
    )
    _, alone = make(
        base_folder, keys=keys.select_samples(slice(7, 8)), min_sigma=0.2, max_sigma=0.7, jump=0.3
    )
    torch.testing.assert_close(alone.inputs.latents, batch.inputs.latents[14:16])


def test_without_inversion_there_is_the_denoising_branch_alone(base_folder):
    _, both = make(base_folder)
    updater, one = make(base_folder, inversion=False)
    assert torch.equal(one.inputs.latents, both.inputs.latents[::2])
    assert torch.equal(one.end_sigma, both.end_sigma[::2])
    assert updater.hyper.rows_per_sample == 1


def linear_rows(sigma, end):
    """(rows with linear rewards, coefficients of the positive and of the negative one)."""
    generator = torch.Generator().manual_seed(0)
    clean, noise, velocity, positive, negative = (
        torch.randn(len(sigma), 2, 2, dtype=torch.float64, generator=generator) for _ in range(5)
    )
    rows = DirectAlignRows(
        clean=clean,
        noise=noise,
        sigma=torch.tensor(sigma, dtype=torch.float64),
        end_sigma=torch.tensor(end, dtype=torch.float64),
        velocity=velocity.requires_grad_(),
        rewards=lambda x: ((positive * x).sum((1, 2)), (negative * x).sum((1, 2))),
        copies={},
        advantage=torch.zeros(len(sigma)),
    )
    return rows, positive, negative


def test_the_loss_is_its_closed_form():
    config = SRPOConfig(
        min_sigma=0.5,
        max_sigma=0.9,
        discount=[0.1, 0.3],
        inversion_discount=[0.6, 0.2],
        target=None,
    )
    rows, positive, negative = linear_rows([0.8, 0.6], [0.7, 0.7])
    loss, metrics = srpo.compute_loss(rows, config)
    (gradient,) = torch.autograd.grad(loss.sum(), rows.velocity)
    reach = 0.1 / 0.3  # of the step, over 1 - .7
    # The denoising branch has the discount of sigma .7, halfway; the inversion branch that of sigma
    # .6, a quarter of the way.
    torch.testing.assert_close(gradient[0], reach * (1.2 * positive[0] - negative[0]))
    torch.testing.assert_close(gradient[1], -reach * (1.5 * negative[1] - positive[1]))
    both = [metrics["srpo/reward"], metrics["srpo/reward"] - metrics["srpo/margin"]]
    recovered = rows.recovered_latents
    torch.testing.assert_close(
        both, [(weights * recovered).sum((1, 2)) for weights in (positive, negative)]
    )
    relative = -loss.detach()

    target = relative.mean().item()  # between the two
    loss, metrics = srpo.compute_loss(rows, config.model_copy(update={"target": target}))
    torch.testing.assert_close(loss.detach(), (target - relative).clamp_min(0))
    assert metrics["srpo/active"].tolist() == (relative < target).float().tolist()


def test_without_words_the_two_branches_pull_at_one_reward_by_their_discounts():
    config = SRPOConfig(
        min_sigma=0.5,
        max_sigma=0.9,
        discount=[0.3, 0.3],
        inversion_discount=[0.1, 0.1],
        target=None,
    )
    rows, weights, _ = linear_rows([0.8, 0.6], [0.7, 0.7])
    same = DirectAlignRows(**{**vars(rows), "rewards": lambda x: ((weights * x).sum((1, 2)),) * 2})
    loss, metrics = srpo.compute_loss(same, config)
    (gradient,) = torch.autograd.grad(loss.sum(), rows.velocity)
    reach = 0.1 / 0.3
    torch.testing.assert_close(gradient[0], reach * 0.3 * weights[0])
    torch.testing.assert_close(gradient[1], -reach * 0.1 * weights[1])
    assert (metrics["srpo/margin"] == 0).all()


def test_the_true_velocity_recovers_the_sample_at_every_sigma():
    rows, _, _ = linear_rows([0.99, 0.3, 0.5, 0.96], [0.95, 0.9, 0.5, 0.97])
    exact = DirectAlignRows(**{**vars(rows), "velocity": rows.noise - rows.clean})
    torch.testing.assert_close(exact.recovered_latents, rows.clean)
    assert not torch.allclose(rows.recovered_latents, rows.clean)


def test_updates_take_the_words_in_turn(base_folder):
    config = SRPOConfig(**WORDS)
    assert [config.choose_words(update) for update in range(4)] == [
        ("Good", "Bad"),
        ("Better", "Worse"),
        ("Good", "Worst"),
        ("Better", "Bad"),
    ]
    assert SRPOConfig(positive_words=[], negative_words=["Bad"]).choose_words(0) == ("", "Bad")
    assert DirectAlignConfig.choose_words(config, 0) == ("", "")
    seen = []
    for hyper in (WORDS, {"positive_words": [], "negative_words": []}):
        updater, batch = make(
            base_folder,
            lambda images, prompts: seen.append(prompts) or waves(images, prompts),
            **hyper,
        )
        updater.update_policy(batch, 1)
    texts = [[prompt.prompt for prompt in prompts] for prompts in seen]
    of = [text for text in TEXTS for _ in range(2)]
    assert texts == [[f"Good. {text}" for text in of], [f"Bad. {text}" for text in of], of]


def test_a_clip_moves_samples_from_the_negative_word_to_the_positive(base_folder, tmp_path):
    reward = load_reward(make_reward("clipscore", tmp_path / "clip"))
    words = {
        "positive_words": ["cat"],
        "negative_words": ["dog 3 birds"],
        "target": None,
        "min_sigma": 0.3,
        "max_sigma": 0.8,
    }
    updater, batch = make(base_folder, reward.score_with_gradient, lr=3.0, **words)
    before = margin(updater.policy.model, reward)
    for _ in range(3):
        updater.update_policy(batch, 1)
    assert margin(updater.policy.model, reward) > before + 0.05


@torch.no_grad()
def margin(model, reward):
    """How much more samples of a policy look like the positive word than like the negative one."""
    latents = generate_samples(
        model, model.encode_texts(TEXTS), KEYS, SamplerConfig(name="ode", steps=4)
    ).latents
    images = model.decode_with_gradient(latents)
    prompts = (
        [Prompt(0, f"{word}. {text}", "", None, "", "train", "{}") for text in TEXTS]
        for word in ("cat", "dog 3 birds")
    )
    positive, negative = (reward.score_with_gradient(images, shown) for shown in prompts)
    return (positive - negative).mean().item()


def test_a_band_without_width_is_refused_and_a_user_s_own_loss_is_tried():
    with pytest.raises(
        ValidationError, match=re.escape("min_sigma = 0.8 is not below max_sigma = 0.5")
    ):
        SRPOConfig(min_sigma=0.8, max_sigma=0.5)
    with pytest.raises(ValidationError):
        SRPOConfig(discount=[0.1])
    try_loss("mine:SRPO", srpo.ALGORITHM, SRPOConfig())
