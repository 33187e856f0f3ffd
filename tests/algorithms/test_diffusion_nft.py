"""DiffusionNFT against its formula, written out again here, and against closed forms, in float64."""

import pytest
import torch

from ebbflow.algorithms import diffusion_nft
from ebbflow.algorithms.base import ForwardTerms
from ebbflow.algorithms.registry import ALGORITHMS
from ebbflow.recipe.algorithms import DiffusionNFT

ROWS, SHAPE = 5, (2, 3)
ELEMENTS = 6


def draws(seed=0):
    """clean, noise, sigma, velocity, old, reference, advantage."""
    generator = torch.Generator().manual_seed(seed)
    clean, noise, velocity, old, reference = (
        torch.randn(ROWS, *SHAPE, dtype=torch.float64, generator=generator) for _ in range(5)
    )
    sigma = torch.rand(ROWS, dtype=torch.float64, generator=generator) * 0.9 + 0.05
    advantage = torch.tensor([-5.0, -1.3, 0.0, 0.7, 5.0], dtype=torch.float64)
    return clean, noise, sigma, velocity, old, reference, advantage


def as_terms(clean, noise, sigma, velocity, old, reference, advantage):
    return ForwardTerms(clean, noise, sigma, velocity, {"old": old, "reference": reference}, advantage)


def transcribed(clean, noise, sigma, velocity, old, reference, advantage, beta, k, weights=None):
    """ALGORITHMS.md, section 5, literally; ``weights`` (w+, w-) are frozen when given."""
    p = torch.clip(torch.clip(advantage, -5, 5) / 10 + 0.5, 0, 1)
    s = sigma[:, None, None]
    x = (1 - s) * clean + s * noise
    predictions = x - s * (beta * velocity + (1 - beta) * old), x - s * ((1 + beta) * old - beta * velocity)
    if weights is None:
        weights = [(x0 - clean).abs().mean((1, 2)).clamp(min=1e-5).detach() for x0 in predictions]
    plus, minus = (((x0 - clean) ** 2 / w[:, None, None]).mean((1, 2)) for x0, w in zip(predictions, weights, strict=True))
    loss = 5 * ((p * plus + (1 - p) * minus) / beta).mean() + k * ((velocity - reference) ** 2).mean()
    return loss, weights


@pytest.mark.parametrize("beta", [0.03, 0.1, 1.0])
@pytest.mark.parametrize("k", [0.0, 1e-4, 0.5])
def test_the_loss_is_the_published_formula(beta, k):
    for seed in range(5):
        expected, _ = transcribed(*draws(seed), beta=beta, k=k)
        loss, _ = diffusion_nft.loss(as_terms(*draws(seed)), DiffusionNFT(beta=beta, reference_weight=k))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_finite_differences_with_the_weights_frozen(beta):
    clean, noise, sigma, velocity, old, reference, advantage = draws()
    leaf = velocity.clone().requires_grad_()
    loss, _ = diffusion_nft.loss(
        as_terms(clean, noise, sigma, leaf, old, reference, advantage), DiffusionNFT(beta=beta, reference_weight=0.3)
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    _, weights = transcribed(*draws(), beta=beta, k=0.3)

    def value(v):
        return transcribed(clean, noise, sigma, v, old, reference, advantage, beta, 0.3, weights)[0].item()

    for index in range(velocity.numel()):
        step = torch.zeros_like(velocity)
        step.view(-1)[index] = 1e-6
        numeric = (value(velocity + step) - value(velocity - step)) / 2e-6
        assert gradient.view(-1)[index].item() == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def gradient_at_old(beta, advantage):
    clean, noise, sigma, _, old, reference, _ = draws()
    leaf = old.clone().requires_grad_()
    terms = as_terms(clean, noise, sigma, leaf, old, reference, advantage)
    loss, _ = diffusion_nft.loss(terms, DiffusionNFT(beta=beta, reference_weight=0))
    return torch.autograd.grad(loss, leaf)[0]


def test_at_the_old_policy_the_gradient_is_the_preference_times_the_error():
    clean, noise, sigma, _, old, _, advantage = draws()
    s = sigma[:, None, None]
    error = (1 - s) * clean + s * noise - s * old - clean
    weight = error.abs().mean((1, 2), keepdim=True)
    preference = (2 * (advantage / 10 + 0.5) - 1)[:, None, None]
    expected = -10 / (ROWS * ELEMENTS) * preference * error * s / weight
    for beta in (0.02, 0.1, 0.5, 1.0):
        assert (gradient_at_old(beta, advantage) - expected).abs().max() < 1e-12


def test_a_sample_as_good_as_its_group_teaches_nothing():
    gradient = gradient_at_old(0.1, torch.zeros(ROWS, dtype=torch.float64))
    assert gradient.abs().max() < 1e-14


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_velocity_goes_from_the_old_one_to_or_from_the_target(beta, sign):
    # p = 1: v+ is the target u = eps - x0 where v = v_old + (u - v_old) / beta. p = 0: v- is, on the other side of v_old.
    clean, noise, sigma, velocity, old, reference, _ = draws()
    best = old + sign * (noise - clean - old) / beta
    advantage = torch.full((ROWS,), 5.0 * sign, dtype=torch.float64)
    config = DiffusionNFT(beta=beta, reference_weight=0)
    at_best, _ = diffusion_nft.loss(as_terms(clean, noise, sigma, best, old, reference, advantage), config)
    elsewhere, _ = diffusion_nft.loss(as_terms(clean, noise, sigma, velocity, old, reference, advantage), config)
    assert at_best.item() < 1e-12 < elsewhere.item()


def test_steps_of_the_loss_approach_what_is_good_and_leave_what_is_bad():
    clean, noise, sigma, _, old, reference, _ = draws()
    target = noise - clean
    for sign in (1, -1):
        gradient = gradient_at_old(0.1, torch.full((ROWS,), 3.0 * sign, dtype=torch.float64))
        after = old - 0.01 * gradient
        nearer = ((after - target) ** 2).flatten(1).mean(1) < ((old - target) ** 2).flatten(1).mean(1)
        assert nearer.tolist() == [sign == 1] * ROWS


def test_preference_stays_a_probability():
    clean, noise, sigma, velocity, old, reference, _ = draws()
    config = DiffusionNFT(beta=0.5, reference_weight=0)

    def loss(advantage):
        values = torch.full((ROWS,), advantage, dtype=torch.float64)
        return diffusion_nft.loss(as_terms(clean, noise, sigma, velocity, old, reference, values), config)[0].item()

    assert loss(5.0) == loss(50.0)
    assert loss(-5.0) == loss(-50.0)
    assert loss(5.0) != loss(4.0)


def test_metrics():
    clean, noise, sigma, velocity, old, reference, advantage = draws()
    _, metrics = diffusion_nft.loss(as_terms(clean, noise, sigma, velocity, old, reference, advantage), DiffusionNFT(beta=0.2))
    assert metrics["kl/reference"].item() == pytest.approx(((velocity - reference) ** 2).mean().item())
    assert metrics["nft/old_deviation"].item() == pytest.approx(((velocity - old) ** 2).mean().item())
    at_old = as_terms(clean, noise, sigma, old, old, reference, advantage)
    _, metrics = diffusion_nft.loss(at_old, DiffusionNFT(reference_weight=0))
    assert metrics["nft/better_error"].item() == pytest.approx(metrics["nft/worse_error"].item())
    assert "kl/reference" not in metrics


def test_it_asks_for_the_copies_it_uses():
    algorithm = ALGORITHMS["diffusion_nft"]
    assert algorithm.copies(DiffusionNFT()) == {"old", "reference"}
    assert algorithm.copies(DiffusionNFT(reference_weight=0)) == {"old"}
    assert algorithm.draws(DiffusionNFT(noise_levels=3)) == 3


def test_old_policy_decay_grows_linearly_to_its_limit():
    config = DiffusionNFT(old_policy_decay=0.8, old_policy_decay_steps=4)
    assert [diffusion_nft.old_decay(config, step) for step in range(7)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert diffusion_nft.old_decay(DiffusionNFT(old_policy_decay=0.8, old_policy_decay_steps=0), 0) == 0.8
    assert diffusion_nft.old_decay(DiffusionNFT(old_policy_decay=0), 9) == 0
