"""Latents that are noised again, against the forward process and the scores of Gaussians."""

import pytest
import torch

from ebbflow.flow.renoising import compute_score_target, renoise_latents
from ebbflow.flow.sampler import compute_transition, sample_next_latents

SIGMAS = torch.tensor([1.0, 0.8, 0.55, 0.2, 0.0], dtype=torch.float64)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_noise_that_is_added_twice_is_that_of_the_higher_level():
    clean, noise, fresh = (normal(200_000, 1, 1, seed=seed) for seed in range(3))
    sigma = torch.full((len(clean),), 0.3, dtype=torch.float64)
    to = torch.full((len(clean),), 0.8, dtype=torch.float64)
    again = renoise_latents(0.7 * 2 * clean + 0.3 * noise, fresh, sigma, to)
    assert again.var().item() == pytest.approx(0.2**2 * 4 + 0.8**2, rel=0.01)
    torch.testing.assert_close(
        renoise_latents(clean, fresh, sigma, sigma), clean, rtol=1e-12, atol=1e-7
    )
    once = renoise_latents(clean, fresh, torch.zeros_like(to), to)
    torch.testing.assert_close(once, 0.2 * clean + 0.8 * fresh, rtol=1e-12, atol=1e-14)


def test_a_clean_latent_has_the_target_of_flow_matching():
    clean = normal(3, 2, 3, seed=0)
    fresh = normal(3, 2, 3, seed=1)
    to = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    beta, target = compute_score_target(clean, fresh, torch.zeros_like(to), to)
    torch.testing.assert_close(beta, torch.ones_like(to), rtol=1e-12, atol=0)
    torch.testing.assert_close(target, fresh - clean, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("sigma", "to"), [(0.5, 0.55), (0.5, 0.9), (0.2, 0.4), (0.0, 0.7)])
def test_the_target_leads_to_the_score_even_where_image_and_noise_are_of_one_draw(sigma, to):
    """x0 = .6 + .4 z of the same z that the deterministic step leaves in x_s: regressing to x0
    would not give the score.
    """
    z = normal(400_000, 1, seed=0)
    fresh = normal(400_000, 1, seed=1)
    levels = torch.full((2, len(z)), sigma, dtype=torch.float64)
    levels[1] = to
    latents = (1 - sigma) * (0.6 + 0.4 * z) + sigma * z
    noised, (beta, target) = (
        renoise_latents(latents, fresh, *levels),
        compute_score_target(latents, fresh, *levels),
    )
    design = torch.cat([noised, torch.ones_like(noised)], 1)
    slope, intercept = torch.linalg.lstsq(beta[0] * design, target).solution[:, 0].tolist()
    kept = (1 - to) / (1 - sigma)
    mean = kept * (1 - sigma) * 0.6
    variance = kept**2 * ((1 - sigma) * 0.4 + sigma) ** 2 + to**2 - (kept * sigma) ** 2
    # v = -(t score + x) / (1 - t) with the score (mean - x) / variance
    assert slope == pytest.approx((to / variance - 1) / (1 - to), abs=0.02)
    assert intercept == pytest.approx(-to * mean / variance / (1 - to), abs=0.02)


@pytest.mark.parametrize("steps", [4, 8])
def test_no_step_of_a_shifted_schedule_decides_the_fake_score_by_its_noise(steps):
    """At the best velocity the gradient of the loss is noise alone, and the last step adds most of
    it.
    """
    schedule = [
        3 * sigma / (1 + 2 * sigma)
        for sigma in torch.linspace(1, 0, steps + 1, dtype=torch.float64).tolist()
    ]
    clean, noise, fresh = (normal(20_000, 1, seed=seed) for seed in range(3))
    uniform = torch.rand(
        len(clean), dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    gradients = []
    for start, end in zip(schedule, schedule[1:], strict=False):
        low = max(end, 0.02)
        high = min(start, 0.98)
        sigma = torch.full_like(uniform, end)
        to = low + (high - low) * uniform
        latents = (1 - sigma)[:, None] * clean + sigma[:, None] * noise
        noised, (beta, target) = (
            renoise_latents(latents, fresh, sigma, to),
            compute_score_target(latents, fresh, sigma, to),
        )
        best = ((to / ((1 - to) ** 2 + to**2) - 1) / (1 - to))[
            :, None
        ] * noised  # images of a standard normal distribution
        gradients.append((beta[:, None] * (beta[:, None] * best - target)).square().mean().item())
    assert max(gradients[:-1]) < gradients[-1] < 2, gradients


def test_the_cps_sampler_with_eta_one_noises_its_clean_prediction_again():
    """Multistep sampling of consistency models, and of DMD2."""
    latents, velocity, fresh = (normal(3, 2, 3, seed=seed) for seed in range(3))
    for step in range(4):
        move = compute_transition("cps", latents, velocity, SIGMAS, step, eta=1.0)
        clean = latents - SIGMAS[step] * velocity
        expected = (1 - SIGMAS[step + 1]) * clean + SIGMAS[step + 1] * fresh
        torch.testing.assert_close(
            sample_next_latents(move, fresh), expected, rtol=1e-12, atol=1e-12
        )
