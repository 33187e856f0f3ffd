"""The gradient of distribution matching: against scores of Gaussians, the published formula, and
where a student ends.
"""

import pytest
import torch
from algorithm_rows import SHAPE, doubles, normal, wide

from ebbflow.algorithms.base import MatchingRows
from ebbflow.algorithms.built_in import dmd2, tdm
from ebbflow.algorithms.built_in.dmd2 import DMD2Config
from ebbflow.algorithms.built_in.tdm import TDMConfig
from ebbflow.algorithms.distribution_matching import compute_gradient, compute_loss

LEVELS = doubles([0.05, 0.3, 0.6, 0.95])


def gaussian_velocity(noised, level, mean, std):
    """E[eps - x0 | x_t] of x0 ~ N(mean, std^2), at x_t = (1 - t) x0 + t eps."""
    variance = (1 - level) ** 2 * std**2 + level**2
    clean = mean + (1 - level) * std**2 / variance * (noised - (1 - level) * mean)
    return (noised - clean) / level


def gaussian_score(noised, level, mean, std):
    """The gradient of log p(x_t), by autograd."""
    leaf = noised.clone().requires_grad_()
    density = torch.distributions.Normal(
        (1 - level) * mean, ((1 - level) ** 2 * std**2 + level**2).sqrt()
    )
    return torch.autograd.grad(density.log_prob(leaf).sum(), leaf)[0]


def rows_at(real, fake, seed=0):
    """Rows of a student's first step at ``LEVELS``; both distributions as (mean, std)."""
    latents, leaf, fresh = (normal(4, *SHAPE, seed=10 * seed + index) for index in range(3))
    leaf.requires_grad_()
    sigma = doubles([1.0, 1.0, 0.5, 0.5])
    level = wide(LEVELS)
    noised = ((1 - level) * (latents - wide(sigma) * leaf) + level * fresh).detach()
    copies = {
        name: gaussian_velocity(noised, level, *of)
        for name, of in {"teacher": real, "fake": fake}.items()
    }
    return MatchingRows(
        latents, sigma, leaf, noised, LEVELS, copies, torch.zeros(4, dtype=torch.float64)
    )


def test_the_gradient_is_the_difference_of_the_scores():
    real = (doubles(0.7), doubles(0.4))
    fake = (doubles(-0.3), doubles(1.2))
    rows = rows_at(real, fake)
    level = wide(LEVELS)
    scores = [gaussian_score(rows.noised, level, *of) for of in (fake, real)]
    distance = (
        (rows.predicted_clean - (rows.noised - level * rows.copies["teacher"])).abs().mean((1, 2))
    )
    expected = level**2 / (1 - level) / wide(distance) * (scores[0] - scores[1])
    torch.testing.assert_close(compute_gradient(rows)[0], expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(compute_gradient(rows)[1], distance.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("algorithm", "config"), [(dmd2.ALGORITHM, DMD2Config()), (tdm.ALGORITHM, TDMConfig())]
)
def test_the_loss_has_the_published_gradient(algorithm, config):
    """grad = (p_real - p_fake) / mean|p_real| of ``compute_distribution_matching_loss``, with the
    predictions of x0.
    """
    rows = rows_at((doubles(0.7), doubles(0.4)), (doubles(-0.3), doubles(1.2)))
    found, metrics = algorithm.loss(rows, config)
    (on_velocity,) = torch.autograd.grad(found.sum(), rows.velocity)
    real, fake = (rows.noised - wide(LEVELS) * rows.copies[name] for name in ("teacher", "fake"))
    p_real = rows.predicted_clean.detach() - real
    p_fake = rows.predicted_clean.detach() - fake
    published = (p_real - p_fake) / p_real.abs().mean((1, 2), keepdim=True)
    expected = (
        published * -wide(rows.sigma) / published[0].numel()
    )  # d x0_hat / d v = -sigma, and the loss is a mean
    torch.testing.assert_close(on_velocity, expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found, (published**2).mean((1, 2)) / 2, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(
        metrics["matching/gradient"], published.abs().mean((1, 2)), rtol=1e-10, atol=1e-14
    )


def test_nothing_moves_a_student_that_is_its_teacher():
    same = (doubles(0.7), doubles(0.4))
    assert compute_loss(rows_at(same, same), DMD2Config())[0].abs().max() == 0


def test_a_gaussian_student_ends_at_its_teacher():
    """x0 = a + b z in one step, with the score of N(a, b^2) as the fake one; the KL is least at the
    teacher's mean and std.
    """
    mean = doubles(0.8)
    std = doubles(0.5)
    a = doubles(-0.5).requires_grad_()
    b = doubles(1.5).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam([a, b], lr=0.03)
    for step in range(400):
        z, fresh = (
            torch.randn(256, 1, 4, dtype=torch.float64, generator=generator) for _ in range(2)
        )
        level = 0.02 + 0.96 * torch.rand(256, dtype=torch.float64, generator=generator)
        clean = a + b * z
        noised = ((1 - wide(level)) * clean + wide(level) * fresh).detach()
        copies = {"teacher": (mean, std), "fake": (a.detach(), b.detach())}
        copies = {name: gaussian_velocity(noised, wide(level), *of) for name, of in copies.items()}
        rows = MatchingRows(
            z, torch.ones_like(level), z - clean, noised, level, copies, torch.zeros_like(level)
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * (1 - step / 400)
        optimizer.zero_grad()
        compute_loss(rows, DMD2Config())[0].mean().backward()
        optimizer.step()
    assert a.item() == pytest.approx(0.8, abs=0.02)
    assert b.item() == pytest.approx(0.5, abs=0.02)
