"""Schedules and velocities on which solvers are compared."""

import torch

DATA_MEAN = 1.5
DATA_STD = 0.5


def schedule(steps, shift=3.0):
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * even / (1 + (shift - 1) * even)


def bent_velocity(x, sigma):
    return torch.sin(3 * x) + sigma * x.roll(1, -1) - 0.4


def affine_velocity(x, sigma):
    """E[eps - x0 | x_sigma = x] for x0 ~ N(m, s^2)."""
    residual = (x - (1 - sigma) * DATA_MEAN) / ((1 - sigma) ** 2 * DATA_STD**2 + sigma**2)
    return sigma * residual - (DATA_MEAN + (1 - sigma) * DATA_STD**2 * residual)
