"""DiffusionNFT against its formula, written out again here, and against closed forms."""

from dataclasses import replace

import pytest
import torch
from algorithm_rows import (
    ELEMENTS,
    at_velocity,
    doubles,
    forward_rows,
    gradient,
    mean_square,
    normal,
    target,
    wide,
)

from ebbflow.algorithms.built_in.diffusion_nft import ALGORITHM, DiffusionNFTConfig
from ebbflow.recipe.algorithms import EmaScheduleConfig

ADVANTAGES = [-5.0, -1.3, 0.0, 0.7, 5.0]
BETAS = [0.03, 0.1, 1.0]


def implicit(rows, beta):
    """v+ and v-."""
    old = rows.copies["old"]
    return beta * rows.velocity + (1 - beta) * old, (1 + beta) * old - beta * rows.velocity


def frozen_weights(rows, beta):
    """w+ and w-."""
    return [
        prediction_error(rows, each).abs().mean((1, 2)).clamp(min=1e-5).detach()
        for each in implicit(rows, beta)
    ]


def prediction_error(rows, velocity):
    """x0_hat - x0."""
    share = wide(rows.sigma)
    noisy = (1 - share) * rows.clean + share * rows.noise
    return noisy - share * velocity - rows.clean


def transcribed(rows, beta, weights):
    """The published loss of each term, literally, with w+ and w- given."""
    largest = rows.advantage_clip
    p = torch.clip(torch.clip(rows.advantage, -largest, largest) / largest / 2 + 0.5, 0, 1)
    errors = [(prediction_error(rows, each) ** 2).mean((1, 2)) for each in implicit(rows, beta)]
    better, worse = (error / weight for error, weight in zip(errors, weights, strict=True))
    return largest * (p * better + (1 - p) * worse) / beta


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("seed", "clip"), [(0, 5.0), (1, 5.0), (2, 1.5)])
def test_the_loss_is_the_published_formula(beta, seed, clip):
    rows = forward_rows(ADVANTAGES, seed=seed, advantage_clip=clip)
    loss, _ = ALGORITHM.loss(rows, DiffusionNFTConfig(beta=beta))
    torch.testing.assert_close(
        loss, transcribed(rows, beta, frozen_weights(rows, beta)), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_is_that_of_the_formula_with_frozen_weights(beta):
    rows = forward_rows(ADVANTAGES)
    weights = frozen_weights(rows, beta)

    def value(velocity):
        return transcribed(replace(rows, velocity=velocity), beta, weights).sum()

    found = gradient(ALGORITHM, rows, DiffusionNFTConfig(beta=beta), rows.velocity)
    for index in range(rows.velocity.numel()):
        step = torch.zeros_like(rows.velocity)
        step.view(-1)[index] = 1e-6
        numeric = (value(rows.velocity + step) - value(rows.velocity - step)).item() / 2e-6
        assert found.view(-1)[index].item() == pytest.approx(numeric, rel=1e-5, abs=1e-6)


def at_old(advantage, beta):
    """(rows under the old policy, the gradient there)."""
    rows = forward_rows(advantage)
    rows = at_velocity(rows, rows.copies["old"])
    return rows, gradient(ALGORITHM, rows, DiffusionNFTConfig(beta=beta), rows.velocity)


@pytest.mark.parametrize("beta", [0.02, 0.1, 0.5, 1.0])
def test_at_the_old_policy_the_gradient_is_the_preference_times_the_error(beta):
    # 5 / beta (p - (1 - p)) beta 2 (x0_hat - x0) (-sigma) / (D w): beta cancels.
    rows, found = at_old(ADVANTAGES, beta)
    error = prediction_error(rows, rows.velocity.detach())
    preference = 2 * (rows.advantage / 10 + 0.5) - 1
    weight = error.abs().mean((1, 2))
    expected = -10 / ELEMENTS * wide(preference * rows.sigma / weight) * error
    assert expected[0].abs().max() > 0.1
    assert (found - expected).abs().max() < 1e-12


def test_a_sample_as_good_as_its_group_teaches_nothing():
    assert at_old([0.0] * 5, 0.1)[1].abs().max() < 1e-14


def test_steps_of_the_loss_approach_what_is_good_and_leave_what_is_bad():
    rows, found = at_old([3.0, -3.0, 3.0, -3.0], 0.1)
    old = rows.velocity.detach()
    nearer = mean_square(old - 0.01 * found - target(rows)) < mean_square(old - target(rows))
    assert nearer.tolist() == [True, False, True, False]


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_the_best_velocity_goes_from_the_old_one_to_or_from_the_target(beta):
    # p = 1: v+ is the target u where v = v_old + (u - v_old) / beta. p = 0: v- is, on the other
    # side of v_old.
    rows = forward_rows([5.0, -5.0])
    old = rows.copies["old"]
    best = at_velocity(rows, old + wide(doubles([1, -1])) * (target(rows) - old) / beta)
    config = DiffusionNFTConfig(beta=beta)
    assert ALGORITHM.loss(best, config)[0].max() < 1e-12
    assert ALGORITHM.loss(rows, config)[0].min() > 1e-2


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("advantage", [0.5, 2.0, 4.0])
def test_without_weights_the_best_velocity_of_a_good_and_a_bad_sample_is_the_published_one(
    beta, advantage
):
    # One noisy latent, two clean ones that it may come from, preferred with p and 1 - p. The
    # targets v+ and v- are so close to the old velocity that both weights are at their lower bound,
    # and so equal: the minimiser of the sum is then v_old + (2p - 1) / (2 beta) (v+ - v-).
    tiny = 1e-8
    good, bad, old = (tiny * normal(1, 2, 3, seed=seed) for seed in range(3))
    p = advantage / 10 + 0.5
    best = old + (2 * p - 1) / (2 * beta) * (good - bad)
    rows = forward_rows([advantage, -advantage], group_index=[0, 0])
    zeros = torch.zeros_like(rows.clean)
    rows = replace(
        rows, clean=zeros, noise=torch.cat([good, bad]), copies={"old": torch.cat([old, old])}
    )

    def total_gradient(velocity):
        here = at_velocity(rows, velocity.expand(2, 2, 3))
        assert max(weight.max() for weight in frozen_weights(here, beta)) == 1e-5
        return gradient(ALGORITHM, here, DiffusionNFTConfig(beta=beta), here.velocity).sum(0).norm()

    assert total_gradient(best) < 1e-9 * total_gradient(old)
    assert total_gradient(good) > 1e-3 * total_gradient(old)


@pytest.mark.parametrize(
    ("mode", "preference"),
    [
        ("all", [0, 0.37, 0.5, 0.57, 1]),
        ("positive_only", [0.5, 0.5, 0.5, 0.57, 1]),
        ("negative_only", [0, 0.37, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_the_five_advantage_modes(mode, preference):
    # The published modes shape the clamped advantage first and turn it into p = A / 10 + 1/2
    # afterwards.
    loss, metrics = ALGORITHM.loss(
        forward_rows(ADVANTAGES), DiffusionNFTConfig(beta=0.5, advantages=mode)
    )
    better = metrics["nft/better_error"]
    worse = metrics["nft/worse_error"]
    found = (loss * 0.5 / 5 - worse) / (better - worse)
    assert found.tolist() == pytest.approx(preference, abs=1e-12)


def test_preference_stays_a_probability():
    def loss(advantage):
        return ALGORITHM.loss(forward_rows([advantage] * 3), DiffusionNFTConfig(beta=0.5))[0]

    assert torch.equal(loss(5.0), loss(50.0))
    assert torch.equal(loss(-5.0), loss(-50.0))
    assert (loss(5.0) != loss(4.0)).all()


def test_nft_metrics_equal_their_definitions():
    rows = forward_rows(ADVANTAGES)
    _, metrics = ALGORITHM.loss(rows, DiffusionNFTConfig(beta=0.2))
    torch.testing.assert_close(
        metrics["nft/old_deviation"], mean_square(rows.velocity - rows.copies["old"])
    )
    _, metrics = ALGORITHM.loss(at_velocity(rows, rows.copies["old"]), DiffusionNFTConfig(beta=0.2))
    torch.testing.assert_close(metrics["nft/better_error"], metrics["nft/worse_error"])
    assert (metrics["nft/old_deviation"] == 0).all()


@pytest.mark.parametrize(
    ("old", "published"),
    [
        (EmaScheduleConfig(max_decay=0), lambda n: 0.0),
        (EmaScheduleConfig(slope=0.001, max_decay=0.5), lambda n: min(0.001 * n, 0.5)),
        (
            EmaScheduleConfig(warmup=75, slope=0.0075, max_decay=0.999),
            lambda n: 0.0 if n < 75 else min(0.0075 * (n - 75), 0.999),
        ),
    ],
)
def test_the_three_published_decays_of_the_old_policy(old, published):
    config = DiffusionNFTConfig(old=old)
    for step in [1, 2, 74, 75, 76, 100, 207, 208, 209, 499, 500, 501, 10_000]:
        assert ALGORITHM.follows["old"](config, step) == pytest.approx(published(step), abs=1e-12)


def test_by_default_the_old_policy_follows_as_published():
    decay = [ALGORITHM.follows["old"](DiffusionNFTConfig(), step) for step in (1, 100, 500, 501)]
    assert decay == pytest.approx([0.001, 0.1, 0.5, 0.5])


def test_another_schedule_nearly_keeps_the_old_policy_after_ten_steps():
    config = DiffusionNFTConfig(old={"slope": 0.09, "max_decay": 0.9})
    decay = [ALGORITHM.follows["old"](config, step) for step in (1, 5, 10, 11, 99)]
    assert decay == pytest.approx([0.09, 0.45, 0.9, 0.9, 0.9])


def test_the_old_policy_generates_and_is_needed():
    assert ALGORITHM.generates == "old"
    assert ALGORITHM.copies(DiffusionNFTConfig()) == {"old"}
