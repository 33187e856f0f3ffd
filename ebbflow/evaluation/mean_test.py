"""The test that a mean is above zero, for few values and heavy tails: the gate's evidence.

A sample in which no disaster happened cannot show how rare disasters are. So the test adds to the n
differences one more prompt, on which the candidate falls as far as it can, and asks how often a
random weighting of the n + 1 values has a mean of at most zero (the Bayesian bootstrap of Rubin,
Annals of Statistics 9, 1981, with one more value). This is the bound of N. Gaffke (Three test
statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative variable,
Mathematical Methods of Statistics 14, 2005) and of Learned-Miller and Thomas (A new confidence
interval for the mean of a bounded random variable, arXiv 1905.06208). For values that cannot be
below the worst one it is proven where they are two, where it is the exact binomial test, and
conjectured in general: no counterexample is known. ``python -m benchmarks.gate`` measures it.

The weights are Dirichlet(1, ..., 1), that is exponential variables E divided by their sum, so the
p-value is P(y_0 E_0 + ... + y_n E_n <= 0). It is computed as an integral and not by resampling: no
seed, and p-values of 1e-9 are exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

SECTIONS = 8
"""Into which the interval that holds the saddle point is cut at once."""
CUTS = 8
"""Of that interval, one after another; any point of what is left gives the same integral."""
BOUND_HALVINGS = 30
"""Of the interval that holds a confidence bound: to 1e-9 of its width."""
STEP = 0.08
"""Between the points of the integral, for up to ``STEP_COUNT`` terms; it converges exponentially in
the inverse of the step, and more terms oscillate faster.
"""
STEP_COUNT = 128
MAX_REACH = 32.0
"""Where the integral ends at the latest; tails of two terms are negligible by then."""
NEGLIGIBLE = 1e-14
"""Where the integrand has fallen to this share of its largest value, the integral ends."""
POINTS_AT_ONCE = 32
"""Points of the integral that are computed together: a call of NumPy on few numbers takes as long
as one on a thousand.
"""
MAX_NUMBERS = 2**22
"""Numbers that are in memory together: of more rows, some are computed after the others."""


def compute_p_values(values: ArrayLike, worst: ArrayLike) -> np.ndarray:
    """Compute the p-value of "the mean is at most zero".

    Example:
        One value of .3 that could have been -.9: P(.3 E_1 <= .9 E_0) = .9 / (.3 + .9) = .75. With
        128 values of .3 it is .75^128 = 1e-16.

    Args:
        values: finite, [..., n], paired differences of prompts.
        worst: the lowest that a value can be, [...] or a number, at most the lowest of ``values``.

    Returns:
        [...], each in [0, 1].

    Raises:
        ValueError: there are no values, one is not finite, or one is below ``worst``.
    """
    values = np.asarray(values, np.float64)
    worst = np.broadcast_to(np.asarray(worst, np.float64), values.shape[:-1])
    if not values.shape[-1] or not np.isfinite(values).all():
        raise ValueError(
            f"a test needs finite differences, got {values.shape[-1]} of which"
            f" {int((~np.isfinite(values)).sum())} are not finite; evaluate more prompts"
        )
    if (values.min(axis=-1) < worst).any():
        raise ValueError(
            "a difference is below the lowest possible one; correct the range of the scores"
        )
    terms = np.concatenate([worst[..., None], values], axis=-1)
    rows = terms.reshape(-1, terms.shape[-1])
    p_values = np.empty(len(rows))
    # A sum of terms of one sign has that sign.
    rises = rows.max(axis=1) > 0
    falls = rows.min(axis=1) < 0
    p_values[rises & ~falls] = 0.0
    p_values[~rises] = 1.0
    both = rises & falls
    # The scale changes nothing, and keeps the numbers far from overflow.
    scaled = rows[both] / np.abs(rows[both]).max(axis=1, keepdims=True)
    at_once = max(1, MAX_NUMBERS // (POINTS_AT_ONCE * terms.shape[-1]))
    parts = [scaled[start : start + at_once] for start in range(0, len(scaled), at_once)]
    p_values[both] = np.concatenate([_integrate_tail(part) for part in parts] or [np.empty(0)])
    return p_values.reshape(worst.shape)


def compute_lower_bounds(values: ArrayLike, worst: ArrayLike, error: float) -> np.ndarray:
    """Compute lower confidence bounds of means: the test rejects "the mean is at most b" for every
    b below the bound.

    Args:
        values, worst: as in ``compute_p_values``.
        error: the one-sided error, in (0, .5).

    Returns:
        [...].
    """
    values = np.asarray(values, np.float64)
    low = np.broadcast_to(np.asarray(worst, np.float64), values.shape[:-1]).copy()
    start = low.copy()
    high = values.mean(axis=-1)
    for _ in range(BOUND_HALVINGS):
        middle = (low + high) / 2
        rejected = compute_p_values(values - middle[..., None], start - middle) < error
        low = np.where(rejected, middle, low)
        high = np.where(rejected, high, middle)
    return low


def _integrate_tail(terms: np.ndarray) -> np.ndarray:
    """Compute P(sum of terms times exponential variables <= 0) of each row [R, N] that has terms of
    both signs.

    The probability is the integral of exp(K(s)) / (-s) along a vertical line left of 0, with K(s) =
    - sum of log(1 - s y) (Daniels, Annals of Mathematical Statistics 25, 1954). The line through
    the saddle point makes the integrand a bell; s = c + i t with t = width * sinh(u) also follows
    tails that fall slowly, and the trapezoidal rule then needs few points.
    """
    centre = _find_saddle_points(terms)[:, None]  # [R, 1]
    growth = 1 - centre * terms  # [R, N], all positive
    log_height = -np.log(growth).sum(axis=1) - np.log(-centre[:, 0])
    # The second derivative of the exponent at the saddle point.
    curvature = ((terms / growth) ** 2).sum(axis=1) + 1 / centre[:, 0] ** 2
    width = 1 / np.sqrt(curvature)
    # Relative to its value at t = 0 the integrand is 1 / ((1 + i t / c) * product of 1 - i t a).
    slopes = terms / growth
    total = np.full(len(terms), 0.5)
    step = STEP / max(1.0, np.sqrt(terms.shape[1] / STEP_COUNT))
    every_u = np.arange(step, MAX_REACH, step)[:, None]  # [P, 1]
    for start in range(0, len(every_u), POINTS_AT_ONCE):
        u = every_u[start : start + POINTS_AT_ONCE]
        t = width * np.sinh(u)  # [P, R]
        scaled = t[..., None] * slopes  # [P, R, N]
        log_size = -0.5 * np.log1p(scaled**2).sum(axis=-1)
        log_size -= 0.5 * np.log1p((t / centre[:, 0]) ** 2)
        phase = np.arctan(scaled).sum(axis=-1) - np.arctan(t / centre[:, 0])
        size = np.exp(log_size) * np.cosh(u)
        total += (size * np.cos(phase)).sum(axis=0)
        if size[-1].max(initial=0.0) < NEGLIGIBLE:
            break
    p_values = np.exp(log_height) * width * step * total / np.pi
    return np.asarray(np.clip(p_values, 0.0, 1.0))


def _find_saddle_points(terms: np.ndarray) -> np.ndarray:
    """Find where the integrand is smallest between its poles at 1 / min(terms) and 0, [R]."""
    pole = 1 / terms.min(axis=1)
    # As shares of the pole: 0 is at the origin and 1 at the pole. The exponent is convex, so its
    # slope has one sign on each side of its smallest value.
    low = np.zeros(len(terms))
    width = 1.0
    for _ in range(CUTS):
        width /= SECTIONS
        shares = low + width * np.arange(1, SECTIONS)[:, None]  # [SECTIONS - 1, R]
        s = shares * pole
        slope = (terms / (1 - s[..., None] * terms)).sum(axis=-1) - 1 / s
        # A slope that is not positive: the smallest value is further right, nearer to the pole.
        low = low + width * (slope > 0).sum(axis=0)
    return np.asarray((low + width / 2) * pole)
