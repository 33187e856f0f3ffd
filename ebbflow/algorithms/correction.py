r"""The correction of rollouts that another policy generated than the one that trains. With S
samples of W trained steps,

    delta = log_prob_train - log_prob_rollout      [S, W], MEANS over the D elements of a latent
    x     = delta (unit "mean") or D delta (unit "sum")
    w     = exp(x) at every step, or exp(sum_W x) of the trajectory at each of its steps

    truncated   min(w, high)
    masked      w where low <= w <= high, the term dropped elsewhere

    k1 = |x|,   k2 = x^2 / 2,   k3 = exp(x) - 1 - x

A term is dropped where its k, or the mean, sum or maximum of k over the sample's steps, is above
the threshold.

The unit matters. Only D delta is the logarithm of a ratio of densities: over rollouts, E[exp(D
delta)] = 1 and E[k3(D delta)] = KL(rollout || train). With kappa = |mu_train - mu_rollout|^2 / b^2,
D delta ~ N(-kappa / 2, kappa), so E[exp(delta)] = exp(-kappa (1 - 1 / D) / (2 D)) < 1, and the
standard deviation of delta is sqrt(kappa) / D: 2e-4 for a bf16 rollout of D = 512. A threshold on
the mean unit is of that size, or it never triggers.

So the ratio against the rollout's log-probs (mode bypass) corrects next to nothing: it is
exp(delta), the true ratio to the power 1 / D, and of its own step alone. Only exp(D delta) of the
whole trajectory has the gradient of the policy that trains. On a linear Gaussian policy with D = 3
and W = 2 whose gradient is .2168, rollouts of an older one give .2298, with bypass .2274, with
weights of each step .2232, and with weights of the trajectory .2168
(tests/algorithms/test_correction.py).

Everything is computed in float64 without gradient. Exponents are clamped to +-20 (5e8), so that no
ratio overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbflow.recipe.choices import CorrectionConfig

# exp(20) = 5e8: a ratio that large is far beyond any threshold, and its square is still finite.
MAX_EXPONENT = 20.0


def compute_correction(delta: Tensor, dims: int, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Compute importance weights, and which rows stay.

    Example:
        delta = [[0., 1e-3]] with dims = 1000, unit "sum" at the level of steps and weights
        "truncated" with high = 2: w = [[1., e^1]], so the weights are [[1., 2.]], and keep is
        [[True, True]].

    Args:
        delta: [S, W] of the whole batch: normalised weights have mean 1 over its kept rows.
        dims: D, the elements of a latent.

    Returns:
        weights [S, W] in delta's type, 0 where a row is dropped; keep, bool [S, W]. Dropped rows
        count in no denominator. A delta that is not a number keeps its term and its NaN, for the
        update's own guard to find.
    """
    weights = torch.ones_like(delta, dtype=torch.float64)
    keep = ~_is_rejected(delta, dims, config)

    # Truncation caps a weight and keeps its term, which biases the gradient a little. Masking
    # changes no weight and drops the term.
    if config.weights != "none":
        weights = _compute_ratio(delta, dims, config)
    if config.weights == "truncated":
        weights = weights.clamp_max(config.high)
    # ``~(... | ...)`` and not ``low <= w <= high``, which is False for NaN: NaN has to reach the
    # update's guard and not be masked.
    if config.weights == "masked":
        keep &= ~((weights < config.low) | (weights > config.high))
    weights = weights.where(keep, 0.0)
    if config.normalise and keep.any():
        weights = weights / weights[keep].mean()
    return weights.to(delta.dtype), keep


def compute_correction_metrics(
    delta: Tensor, dims: int, config: CorrectionConfig
) -> dict[str, Tensor]:
    """Compute the shares of the rows that ``high`` capped or dropped, that ``low`` dropped, and
    that were rejected; scalars.
    """
    ratio = _compute_ratio(delta, dims, config)
    above = (ratio > config.high).double()
    below = (ratio < config.low).double()
    return {
        "rollout/clipped_up": above.mean() * (config.weights != "none"),
        "rollout/clipped_down": below.mean() * (config.weights == "masked"),
        "rollout/rejected": _is_rejected(delta, dims, config).double().mean(),
    }


def compute_diagnostics(delta: Tensor, steps: Tensor, dims: int) -> dict[str, Tensor]:
    """Measure how far the rollouts are from the training policy; scalars, all 0 and the ratios 1
    where the two agree.

    ``rollout/k3``, ``rollout/chi2`` = mean(w^2) - 1 and ``rollout/ratio_*`` are of w = exp(delta),
    on the mean unit of the clip ranges. There chi2 is no divergence: it is about 2 mean(delta), and
    negative where the rollout policy made the samples. ``rollout/chi2_sum`` is of w = exp(D delta)
    and estimates the divergence, exp(kappa) - 1; up to about 1 it can be trusted, and beyond it
    only says that the policies are far apart (a few samples carry the mean, and exponents are
    clamped).

    Args:
        delta: [S, W].
        steps: the denoising step of each column, integer [W].
        dims: D, the elements of a latent.
    """
    # float64: with |delta| ~ 1e-5, chi2 and k3 are differences of numbers near 1.
    delta = delta.detach().double()
    magnitude = delta.abs()
    ratio = _clamped_exp(delta)
    metrics = {
        "rollout/delta_mean": magnitude.mean(),
        "rollout/delta_max": magnitude.max(),
        "rollout/k3": _estimate_divergence(delta, "k3").mean(),
        "rollout/chi2": (ratio**2).mean() - 1,
        "rollout/chi2_sum": (_clamped_exp(dims * delta) ** 2).mean() - 1,
        "rollout/ratio_mean": ratio.mean(),
        "rollout/ratio_max": ratio.max(),
    }
    # Also by step, since an engine may differ at some sigmas alone.
    by_step = zip(steps.tolist(), magnitude.mean(0), strict=True)
    return metrics | {f"rollout/delta_step_{step}": mean for step, mean in by_step}


def _scale_to_unit(delta: Tensor, dims: int, config: CorrectionConfig) -> Tensor:
    """Compute x, float64 [S, W]."""
    return delta.detach().double() * (dims if config.unit == "sum" else 1)


def _compute_ratio(delta: Tensor, dims: int, config: CorrectionConfig) -> Tensor:
    """Compute w before any threshold, [S, W]."""
    exponent = _scale_to_unit(delta, dims, config)
    # The product of the ratios of all trained steps, the same at each of them.
    if config.level == "trajectory":
        exponent = exponent.sum(1, keepdim=True).expand_as(exponent)
    return _clamped_exp(exponent)


def _is_rejected(delta: Tensor, dims: int, config: CorrectionConfig) -> Tensor:
    """Return which rows their divergence drops, bool [S, W]; all steps of a sample alike on the
    sequence levels.
    """
    if config.reject == "none":
        return torch.zeros_like(delta, dtype=torch.bool)
    divergence = _estimate_divergence(_scale_to_unit(delta, dims, config), config.reject)
    if config.reject_level == "sequence_mean":
        divergence = divergence.mean(1, keepdim=True)
    elif config.reject_level == "sequence_sum":
        divergence = divergence.sum(1, keepdim=True)
    elif config.reject_level == "sequence_max":
        divergence = divergence.amax(1, keepdim=True)
    return (divergence > config.reject_above).expand_as(delta)


def _estimate_divergence(x: Tensor, kind: str) -> Tensor:
    """Estimate k1, k2 or k3 of http://joschu.net/blog/kl-approx.html, k1 by its magnitude."""
    if kind == "k1":
        return x.abs()
    if kind == "k2":
        return x**2 / 2
    # At |x| ~ 1e-5 the result is 1e-10 of the 1 that exp(x) - 1 would cancel.
    return torch.expm1(x.clamp(-MAX_EXPONENT, MAX_EXPONENT)) - x


def _clamped_exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
