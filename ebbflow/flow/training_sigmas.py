"""The sigmas that a forward-process loss noises final latents to
(``ebbflow.recipe.algorithms.SigmaConfig``).

A shift by k is sigma = k s / (1 + (k - 1) s) of an unshifted s, as in Stable Diffusion 3
(2403.03206, section 5.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.flow.noise import SampleKeys
from ebbflow.recipe.algorithms import SigmaConfig
from ebbflow.seeding import Stream, make_generator

EDGE = 1e-6
"""Quantiles of a logit-normal distribution stay within [EDGE, 1 - EDGE]: its ends are infinite."""


def sample_training_sigmas(
    config: SigmaConfig, schedule: Tensor, keys: SampleKeys, visit: int, uniform: Tensor
) -> Tensor:
    """Sample the sigma of each draw of N samples, float32 [draws, N].

    Example:
        4 stratified draws of kind "uniform" with ``uniform`` = .5 everywhere are the middles of the
        quarters: [.125, .375, .625, .875] for every sample.

    Args:
        schedule: of the stage's sampler, descending, [steps + 1], ending in 0.
        keys: whose sigmas these are; with ``visit`` they fix the order in which unstratified points
            of the schedule are drawn.
        visit: how often these samples were trained on before.
        uniform: a number in [0, 1) for each, from the sample's own generator, [draws, N].

    Raises:
        ValueError: no sigma of the schedule lies in the band.
    """
    draws = len(uniform)
    if config.kind == "schedule":
        points = list_schedule_points(config, schedule)
        if config.stratified:
            return points[_sample_stratified_points(uniform, len(points))]
        return points[_sample_point_orders(keys, visit, draws, len(points))]
    # Stratified: draw i of a sample lies in the i-th of equal parts, so that a sample's loss is
    # seldom of low noise alone or of high noise alone.
    quantile = uniform
    if config.stratified:
        quantile = (torch.arange(draws)[:, None] + uniform) / draws
    return _sigma_of_quantile(quantile, config)


def list_schedule_points(config: SigmaConfig, schedule: Tensor) -> Tensor:
    """List the sigmas of the schedule that lie in the band, descending, [K]; its last, 0, would add
    no noise and never counts.

    Raises:
        ValueError: there is none.
    """
    sigmas = schedule[:-1].float().cpu()
    points = sigmas[(sigmas >= config.min) & (sigmas <= config.max)]
    if not len(points):
        listed = ", ".join(f"{sigma:.3g}" for sigma in sigmas.tolist())
        raise ValueError(
            f"algorithm.sigma: no sigma of the sampler's schedule ({listed}) lies between min ="
            f" {config.min:g} and max = {config.max:g}; widen the band, or raise sampler.steps"
        )
    return points


def _sample_stratified_points(uniform: Tensor, count: int) -> Tensor:
    """Sample a point of each of as many runs of neighbours as there are draws (AWM, 2509.25050):
    integer [draws, N] below ``count``.

    Runs begin at floor(draw * count / draws), so they may differ in length by one, and every run
    has the same weight.
    """
    draws = len(uniform)
    starts = torch.arange(draws + 1) * count // draws
    first = starts[:-1, None]
    # With more draws than points some runs are empty; such a draw takes the point where it begins.
    length = starts.diff().clamp_min(1)[:, None]
    # uniform * length may round up to length.
    return first + (uniform * length).long().clamp_max(length - 1)


def _sample_point_orders(keys: SampleKeys, visit: int, draws: int, count: int) -> Tensor:
    """Sample the points of each draw, without replacement for as long as there are some: integer
    [draws, N] below ``count``.
    """
    rounds = -(-draws // count)  # rounded up: each round is a permutation of all points
    orders = torch.empty(rounds * count, len(keys), dtype=torch.long)
    for column, (prompt_id, sample) in enumerate(zip(keys.prompt_ids, keys.samples, strict=True)):
        generator = make_generator(keys.seed, prompt_id, sample, visit, Stream.SIGMAS)
        # By sorting, not by numpy's permutation, whose algorithm may change between versions.
        numbers = generator.random((rounds, count))
        orders[:, column] = torch.from_numpy(numbers).argsort(1).flatten()
    return orders[:draws]


def _sigma_of_quantile(quantile: Tensor, config: SigmaConfig) -> Tensor:
    """Compute the sigma at a quantile of the distribution inside its band."""
    # A quantile inside the band becomes one of the whole distribution; nothing is sampled again.
    low = _probability_below(config.min, config)
    high = _probability_below(config.max, config)
    quantile = low + (high - low) * quantile
    # sigma = 1 / (1 + exp(-z)) of a standard normal z, before the shift.
    if config.kind == "logit_normal":
        quantile = torch.sigmoid(torch.special.ndtri(quantile.clamp(EDGE, 1 - EDGE)))
    return _shift_sigma(quantile, config.shift)


def move_sigma(sigma: float, by: float, shift: float) -> float:
    """Compute the sigma that lies a distance above another before both are shifted, at most 1."""
    # A shift by 1 / k undoes a shift by k.
    unshifted = _shift_sigma(torch.tensor(sigma, dtype=torch.float64), 1 / shift)
    return float(_shift_sigma((unshifted + by).clamp_max(1.0), shift))


def _probability_below(sigma: float, config: SigmaConfig) -> float:
    """Compute the share of the distribution without its band that lies below a sigma."""
    # A shift by 1 / k undoes a shift by k. Rounding may pass 1.
    unshifted = _shift_sigma(torch.tensor(sigma, dtype=torch.float64), 1 / config.shift).clamp(0, 1)
    if config.kind == "uniform":
        return float(unshifted)
    return float(torch.special.ndtr(torch.logit(unshifted)))


def _shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Compute k s / (1 + (k - 1) s)."""
    return shift * sigma / (1 + (shift - 1) * sigma)
