"""ALGORITHMS.md, section 1: one transition against the golden table, the published steps and exact
Gaussians.
"""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from ebbflow.flow.sampler import (
    compute_log_prob,
    compute_transition,
    find_sampler,
    sample_next_latents,
)

STOCHASTIC = ["flow_sde", "dance_sde", "cps"]
SAMPLERS = ["ode", *STOCHASTIC]
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@pytest.fixture(scope="module")
def shift_3():
    """SD3's ten steps: 1, .9601, .9133, .8577, .7904, .7073, .6022, .4649, .278, .0089, 0."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    return scheduler.sigmas.double()


def schedule(steps):
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


def random_step(seed=0, rows=3):
    generator = torch.Generator().manual_seed(seed)
    latents, velocity, noise = (
        torch.randn(rows, 2, 3, 4, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    return latents, velocity, noise


@pytest.mark.parametrize(
    ("sampler", "eta", "step", "mean", "std", "score"),
    [
        ("flow_sde", 0.7, 0, 0.246435, 0.700000, -0.562276),
        ("flow_sde", 0.7, 4, 0.322591, 0.391794, 0.000916),
        ("flow_sde", 1.2, 4, 0.285843, 0.671647, -0.522340),
        ("cps", 0.8, 0, 0.120905, 0.913137, -0.016665),
        ("cps", 0.8, 4, 0.246155, 0.672662, -0.000015),
        ("dance_sde", 0.3, 0, 0.319397, 0.059903, 1.225039),
        ("dance_sde", 1.2, 4, 0.326771, 0.345904, 0.118027),
    ],
)
def test_transition_equals_the_golden_table(shift_3, sampler, eta, step, mean, std, score):
    latents, velocity, after = (
        torch.full((2, 1, 4, 4), value, dtype=torch.float64) for value in (0.3, -0.5, 0.25)
    )
    move = compute_transition(sampler, latents, velocity, shift_3, step, eta)
    assert move.mean.flatten().tolist() == pytest.approx([mean] * 32, abs=1e-6)
    assert move.std.item() == pytest.approx(std, abs=1e-6)
    assert compute_log_prob(move, after).tolist() == pytest.approx([score] * 2, abs=1e-6)


def test_the_published_noise_levels_are_the_defaults(shift_3):
    default_etas = {sampler: find_sampler(sampler).eta for sampler in SAMPLERS}
    assert default_etas == {"ode": None, "flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8}
    latents, velocity, _ = random_step()
    for sampler in SAMPLERS:
        left_out, given = (
            compute_transition(sampler, latents, velocity, shift_3, 2, eta)
            for eta in (None, default_etas[sampler])
        )
        assert torch.equal(left_out.mean, given.mean)
        assert torch.equal(left_out.std, given.std)


# The steps as their papers and reference implementations write them; x is the latent, v the
# velocity, z the noise.


def published_ode(x, v, z, sigmas, i, eta):
    return x + (sigmas[i + 1] - sigmas[i]) * v


def published_flow_sde(x, v, z, sigmas, i, eta):
    """Flow-GRPO: dx = [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dt + s sqrt|dt| z."""
    sigma = sigmas[i]
    dt = sigmas[i + 1] - sigmas[i]
    s = torch.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma))) * eta
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean + s * torch.sqrt(-dt) * z


def published_dance_sde(x, v, z, sigmas, i, eta):
    """DanceGRPO: the Euler step, corrected by the score of the marginal."""
    sigma = sigmas[i]
    dt = sigmas[i + 1] - sigmas[i]
    score = -(x - (x - sigma * v) * (1 - sigma)) / sigma**2
    return x + dt * v - 0.5 * eta**2 * score * dt + eta * torch.sqrt(-dt) * z


def published_cps(x, v, z, sigmas, i, eta):
    """Coefficients-preserving sampling: predicted data and noise at their coefficients, part of the
    noise made anew.
    """
    after = sigmas[i + 1]
    std = after * math.sin(eta * math.pi / 2)
    return (
        (x - sigmas[i] * v) * (1 - after)
        + (x + v * (1 - sigmas[i])) * torch.sqrt(after**2 - std**2)
        + std * z
    )


PUBLISHED = {
    "ode": published_ode,
    "flow_sde": published_flow_sde,
    "dance_sde": published_dance_sde,
    "cps": published_cps,
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("eta", [0.2, 0.7, 1.0])
def test_the_one_transition_is_the_published_step(shift_3, sampler, eta):
    for step in range(len(shift_3) - 1):
        latents, velocity, noise = random_step(seed=step)
        ours = sample_next_latents(
            compute_transition(sampler, latents, velocity, shift_3, step, eta), noise
        )
        assert ours.dtype == torch.float64
        assert (
            ours - PUBLISHED[sampler](latents, velocity, noise, shift_3, step, eta)
        ).abs().max() < 1e-12


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_std_is_scale_times_the_root_of_the_step(shift_3, sampler):
    latents, velocity, _ = random_step()
    for step in range(10):
        move = compute_transition(sampler, latents, velocity, shift_3, step)
        assert move.dt.item() == pytest.approx(
            (shift_3[step + 1] - shift_3[step]).item(), abs=1e-15
        )
        assert move.std.item() == pytest.approx(
            move.scale.item() * math.sqrt(-move.dt.item()), abs=1e-15
        )


@pytest.mark.parametrize("sampler", ["ode", "cps"])
@pytest.mark.parametrize("eta", [0.3, 0.8])
def test_ode_and_cps_keep_the_noise_level(shift_3, sampler, eta):
    # Where the clean prediction is 0 (latents = sigma eps, velocity = eps), what remains of eps is
    # a: a^2 + b^2 = sigma'^2.
    eps = torch.ones(1, 4, dtype=torch.float64)
    for step in range(10):
        move = compute_transition(sampler, shift_3[step] * eps, eps, shift_3, step, eta)
        kept = move.mean[0, 0] ** 2 + move.std**2
        assert kept.item() == pytest.approx(shift_3[step + 1].item() ** 2, abs=1e-14)


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_without_noise_every_sampler_is_the_ode_and_nears_it_as_eta_squared(shift_3, sampler):
    latents, velocity, _ = random_step()
    ode = compute_transition("ode", latents, velocity, shift_3, 3).mean

    def distance(eta):
        return (
            (compute_transition(sampler, latents, velocity, shift_3, 3, eta).mean - ode)
            .abs()
            .max()
            .item()
        )

    assert distance(0.0) < 1e-15
    assert 0 < distance(1e-3) < 1e-5
    assert distance(2e-2) / distance(1e-2) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde"])
@pytest.mark.parametrize("step", [0, 3, 7])
def test_mean_log_probability_is_the_negative_entropy(shift_3, sampler, step):
    generator = torch.Generator().manual_seed(step)
    latents, velocity, noise = (
        torch.randn(1, 200_000, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    move = compute_transition(sampler, latents, velocity, shift_3, step)
    expected = -math.log(move.std.item()) - HALF_LOG_2PI - 0.5
    assert compute_log_prob(move, sample_next_latents(move, noise)).item() == pytest.approx(
        expected, abs=5e-3
    )


@pytest.mark.parametrize("sampler", STOCHASTIC)
@pytest.mark.parametrize("step", [0, 2, 8])
def test_a_sample_scores_as_the_density_of_its_noise(shift_3, sampler, step):
    latents, velocity, noise = random_step()
    move = compute_transition(sampler, latents, velocity, shift_3, step)
    square = (noise**2).flatten(1).mean(1)
    density = (
        -(move.std**2) * square if sampler == "cps" else -square / 2 - HALF_LOG_2PI - move.std.log()
    )
    assert torch.allclose(
        compute_log_prob(move, sample_next_latents(move, noise)), density, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde"])
def test_log_probability_times_the_elements_is_the_log_density(shift_3, sampler):
    latents, velocity, noise = random_step()
    move = compute_transition(sampler, latents, velocity, shift_3, 4)
    after = sample_next_latents(move, 1.3 * noise)
    density = torch.distributions.Normal(move.mean, move.std).log_prob(after).flatten(1).sum(1)
    assert torch.allclose(compute_log_prob(move, after) * 24, density, rtol=1e-12)


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_a_step_for_each_row_equals_the_steps_one_by_one(shift_3, sampler):
    latents, velocity, noise = random_step()
    steps = torch.tensor([0, 7, 3])
    together = compute_transition(sampler, latents, velocity, shift_3, steps)
    after = sample_next_latents(together, noise)
    for row, step in enumerate(steps.tolist()):
        one = slice(row, row + 1)
        alone = compute_transition(sampler, latents[one], velocity[one], shift_3, step)
        assert torch.equal(together.mean[one], alone.mean)
        assert torch.equal(together.std[row], alone.std)
        assert torch.equal(together.scale[row], alone.scale)
        assert torch.equal(together.dt[row], alone.dt)
        assert torch.equal(after[one], sample_next_latents(alone, noise[one]))
        assert torch.equal(
            compute_log_prob(together, after)[one], compute_log_prob(alone, after[one])
        )


def test_a_deterministic_step_has_no_log_probability(shift_3):
    latents, velocity, _ = random_step()
    for sampler, step in [("ode", 3), ("cps", 9), ("cps", torch.tensor([3, 9, 3]))]:
        with pytest.raises(ValueError, match=f"deterministic step of the {sampler} sampler"):
            compute_log_prob(compute_transition(sampler, latents, velocity, shift_3, step), latents)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_bf16_input_is_computed_in_float32(shift_3, sampler):
    latents, velocity, _ = (value.bfloat16() for value in random_step())
    low = compute_transition(sampler, latents, velocity, shift_3, 2)
    full = compute_transition(sampler, latents.float(), velocity.float(), shift_3, 2)
    assert low.mean.dtype == low.std.dtype == torch.float32
    assert torch.equal(low.mean, full.mean)


# Gaussian data x0 ~ N(m, s^2): the exact velocity is affine in x, so mean and variance along the
# path are known exactly.

DATA_MEAN = 1.5
DATA_STD = 0.5


def exact_velocity(x, sigma):
    """E[eps - x0 | x_sigma = x]."""
    residual = (x - (1 - sigma) * DATA_MEAN) / ((1 - sigma) ** 2 * DATA_STD**2 + sigma**2)
    return sigma * residual - (DATA_MEAN + (1 - sigma) * DATA_STD**2 * residual)


def exact_moments(sampler, sigmas, eta):
    """(mean, variance) before each step and at the end, by pushing x = 0 and x = 1 through the
    published step.
    """
    mean = 0.0
    variance = 1.0
    path = [(0.0, 1.0)]
    zero = torch.tensor(0.0, dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    for step in range(len(sigmas) - 1):

        def move(x, z, step=step):
            return PUBLISHED[sampler](
                x, exact_velocity(x, sigmas[step]), z, sigmas, step, eta
            ).item()

        offset = move(zero, zero)
        slope = move(one, zero) - offset
        noise = move(zero, one) - offset
        mean = slope * mean + offset
        variance = slope**2 * variance + noise**2
        path.append((mean, variance))
    return path


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_follow_the_exact_moments_on_gaussian_data(shift_3, sampler):
    count = 40_000
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, dtype=torch.float64, generator=generator)
    for step, (mean, variance) in enumerate(exact_moments(sampler, shift_3, 0.7)[1:]):
        z = torch.randn(count, 1, dtype=torch.float64, generator=generator)
        x = sample_next_latents(
            compute_transition(sampler, x, exact_velocity(x, shift_3[step]), shift_3, step, 0.7), z
        )
        assert abs(x.mean().item() - mean) < 4 * math.sqrt(variance / count)
        assert abs(x.var().item() - variance) < 4 * variance * math.sqrt(2 / count)


def final_moments(sampler, sigmas, eta):
    """(mean, variance) at the end, by pushing x = 0 and x = 1 through our step."""
    mean = 0.0
    variance = 1.0
    points = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for step in range(len(sigmas) - 1):
        move = compute_transition(
            sampler, points, exact_velocity(points, sigmas[step]), sigmas, step, eta
        )
        offset = move.mean[0, 0].item()
        slope = (move.mean[1, 0] - move.mean[0, 0]).item()
        mean = slope * mean + offset
        variance = slope**2 * variance + move.std.item() ** 2
    return mean, variance


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_a_whole_path_keeps_the_mean_and_nears_the_odes_variance_as_eta_squared(shift_3, sampler):
    (_, ode), (mean, near), (_, far) = (
        final_moments(sampler, shift_3, eta) for eta in (0, 1e-3, 2e-3)
    )
    assert ode == pytest.approx(final_moments("ode", shift_3, 0)[1], rel=1e-12)
    assert mean == pytest.approx(DATA_MEAN, rel=1e-12)
    assert 0 < abs(near - ode) < 1e-4
    assert (far - ode) / (near - ode) == pytest.approx(4, rel=1e-2)


@pytest.mark.parametrize("sampler", ["ode", "flow_sde", "dance_sde"])
def test_fine_steps_end_in_the_distribution_of_the_data(sampler):
    mean, variance = final_moments(sampler, schedule(1000), 0.3)
    assert mean == pytest.approx(DATA_MEAN, abs=5e-3)
    assert math.sqrt(variance) == pytest.approx(DATA_STD, abs=5e-3)
