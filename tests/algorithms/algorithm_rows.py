"""Terms in float64 that every loss is compared on: random ones, and rollouts of one policy scored
under another.
"""

from dataclasses import dataclass, replace

import torch

from ebbflow.algorithms.base import (
    DirectAlignRows,
    ForwardRows,
    GradientRows,
    MatchingRows,
    TrajectoryRows,
)
from ebbflow.flow.sampler import (
    Transition,
    compute_log_prob,
    compute_transition,
    find_sampler,
    sample_next_latents,
)

SHAPE = (2, 3)
ELEMENTS = 6
SIGMAS = torch.tensor([1.0, 0.9, 0.77, 0.6, 0.41, 0.2, 0.0], dtype=torch.float64)
DENSITIES = ["flow_sde", "dance_sde"]
STOCHASTIC = [*DENSITIES, "cps"]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mean_square(values):
    """[M] of [M, 2, 3]."""
    return (values**2).mean((1, 2))


def wide(values):
    """[M] against [M, 2, 3]."""
    return values[:, None, None]


def gradient(algorithm, rows, config, at):
    """Of the sum of the losses; a row of it is that of the row's own loss wherever rows do not
    share a unit.
    """
    loss, _ = algorithm.loss(rows, config)
    return torch.autograd.grad(loss.sum(), at, retain_graph=True)[0]


# Forward-process rows


def forward_rows(advantage, group_index=None, seed=0, advantage_clip=5.0):
    """Random rows with a velocity that is a leaf, all copies, and sigma and noise shared inside a
    group.
    """
    rows = len(advantage)
    group_index = torch.arange(rows) if group_index is None else torch.tensor(group_index)
    fresh = [normal(rows, *SHAPE, seed=10 * seed + index) for index in range(7)]
    sigma = (
        torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.9
        + 0.05
    )
    return ForwardRows(
        clean=fresh[0],
        noise=fresh[1][group_index],
        sigma=sigma[group_index],
        velocity=fresh[2].requires_grad_(),
        copies={"old": fresh[3], "reference": fresh[4], "teacher": fresh[5], "rollout": fresh[6]},
        advantage=doubles(advantage),
        advantage_clip=advantage_clip,
        group_index=group_index,
    )


def at_velocity(rows, velocity):
    """The same rows under another policy, whose velocity is a leaf."""
    return replace(rows, velocity=velocity.detach().clone().requires_grad_())


def target(rows):
    """u."""
    return rows.noise - rows.clean


# Trajectory rows


@dataclass(frozen=True)
class Rollout:
    """Steps that the velocity ``old`` made with ``noise``."""

    sampler: str
    latents: torch.Tensor
    old: torch.Tensor
    noise: torch.Tensor
    steps: torch.Tensor
    advantage: torch.Tensor

    def step(self, velocity) -> Transition:
        return compute_transition(self.sampler, self.latents, velocity, SIGMAS, self.steps)

    def rows(self, velocity, **copies):
        """Its rows under a policy that predicts ``velocity``; ``copies`` by their velocities."""
        old = self.step(self.old)
        step = self.step(velocity)
        after = sample_next_latents(old, self.noise)
        copies = {name: self.step(value) for name, value in copies.items()}
        return TrajectoryRows(
            step,
            compute_log_prob(step, after),
            old.mean,
            compute_log_prob(old, after),
            copies,
            self.advantage,
        )


def rollout(sampler="flow_sde", rows=10, seed=0):
    """Random samples at each of the five stochastic steps in turn."""
    latents, old, noise = (normal(rows, *SHAPE, seed=10 * seed + index) for index in range(3))
    return Rollout(
        sampler, latents, old, noise, torch.arange(rows) % 5, normal(rows, seed=10 * seed + 3)
    )


def moved(made, by=0.05, seed=7):
    """A leaf: the velocity of a policy that is some way from the one that sampled."""
    return (made.old + by * normal(*made.old.shape, seed=seed)).requires_grad_()


def gaussian(mean, std, dt=-0.1):
    """A step with that mean, [M, ...], standard deviation and dt, both the same in every row."""
    std = torch.full((len(mean),), std, dtype=torch.float64)
    dt = torch.full((len(mean),), dt, dtype=torch.float64)
    return Transition(find_sampler("flow_sde"), mean, std, std / dt.abs().sqrt(), dt)


def kl_per_element(step, other):
    """KL(step | other) of two diagonal Gaussians by torch, per latent element, [M]."""
    first, second = (
        torch.distributions.Normal(each.mean, wide(each.std)) for each in (step, other)
    )
    return torch.distributions.kl_divergence(first, second).mean((1, 2))


def gradient_rows(latents, sigma, velocity, advantage, copies=None):
    """Rows of one more Euler step, and of a reward that is best where every latent is .2."""
    return GradientRows(
        latents=latents,
        sigma=sigma,
        velocity=velocity,
        denoise=lambda v: latents - wide(sigma) * v,
        reward=lambda clean: 1 - mean_square(clean - 0.2),
        copies=copies or {},
        advantage=advantage,
    )


def direct_align_rows(clean, noise, sigma, end_sigma, velocity, advantage, copies=None):
    """Rows of one step, and of two rewards that are best where every latent is .2 and .4."""
    return DirectAlignRows(
        clean=clean,
        noise=noise,
        sigma=sigma,
        end_sigma=end_sigma,
        velocity=velocity,
        rewards=lambda x: (-mean_square(x - 0.2), -mean_square(x - 0.4) / 2),
        copies=copies or {},
        advantage=advantage,
    )


def matching_rows(noised_sigma, seed=20):
    """Random rows before a student's first step, with a velocity that is a leaf."""
    rows = len(noised_sigma)
    latents, velocity, noised, teacher, fake, rewarded, base = (
        normal(rows, *SHAPE, seed=seed + index) for index in range(7)
    )
    return MatchingRows(
        latents=latents,
        sigma=torch.ones_like(noised_sigma),
        velocity=velocity.requires_grad_(),
        noised=noised,
        noised_sigma=noised_sigma,
        copies={"teacher": teacher, "fake": fake},
        advantage=torch.zeros_like(noised_sigma),
        rewarded_clean=rewarded,
        base_clean=base,
    )
