"""The difference between candidate and champion on the same prompts, with a confidence interval.

Both sides have the same prompts and noise, so the differences are paired and the spread between
easy and hard prompts cancels. Samples of one prompt are not independent: they are averaged, and
prompts are resampled.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.records import Comparison
from ebbflow.data.schema import KEY
from ebbflow.evaluation.mean_test import compute_lower_bounds, compute_p_values

DRAWS_PER_CHUNK = 4_000_000
"""Bootstrap draws in memory at a time (32 MB)."""


def compute_gain_p_values(candidate: np.ndarray, champion: np.ndarray) -> np.ndarray:
    """Compute the p-values of "the candidate's mean is at or below the champion's", where no prompt
    that was not seen falls further than the worst one seen.

    Args:
        candidate, champion: [..., n] scores of the same prompts.

    Returns:
        [...].
    """
    differences = candidate - champion
    return compute_p_values(differences, np.minimum(differences.min(axis=-1), 0.0))


def compute_disaster_p_values(
    candidate: np.ndarray, champion: np.ndarray, lowest: float | None
) -> np.ndarray:
    """Compute the p-values of "the candidate's mean is at or below the champion's", where a prompt
    that was not seen may fall as far as scores can.

    Where the lowest possible score is known, that is from the champion's mean down to it; where it
    is not, the whole range of the scores that both sides got.

    Example:
        candidate = [.8, .6, .9], champion = [.5, .6, .4]: by .5 where scores cannot be below 0, the
        champion's mean, and by .9 - .4 = .5 where nothing is known.

    Args:
        candidate, champion: [..., n] scores of the same prompts.
        lowest: the lowest possible score; None where it is unknown.

    Returns:
        [...].
    """
    if lowest is None:
        top = np.maximum(candidate.max(axis=-1), champion.max(axis=-1))
        bottom = np.minimum(candidate.min(axis=-1), champion.min(axis=-1))
        worst = bottom - top
    else:
        worst = lowest - champion.mean(axis=-1)
    differences = candidate - champion
    return compute_p_values(differences, np.minimum(worst, differences.min(axis=-1)))


def compute_fall_p_values(
    candidate: np.ndarray, champion: np.ndarray, tolerance: np.ndarray
) -> np.ndarray:
    """Compute the p-values of "the candidate's mean is below the champion's by the tolerance or
    more": the test of non-inferiority.

    The prompt that nobody has seen falls as far as the worst one seen: a guardrail cannot show
    disasters that happened on none of its prompts, which is what the reward's test is for.

    Args:
        candidate, champion: [..., n] scores of the same prompts.
        tolerance: [...], how far the mean may fall.

    Returns:
        [...]; 0 where no prompt fell at all.
    """
    differences = candidate - champion
    values = differences + tolerance[..., None]
    worst = values.min(axis=-1)
    p_values = compute_p_values(values, worst)
    # Also with a tolerance of 0, as where all of the champion's prompts score the same.
    return np.where(differences.min(axis=-1) >= 0, 0.0, p_values)


def compute_paired_interval(
    candidate: np.ndarray, champion: np.ndarray, confidence: float
) -> tuple[float, float, float]:
    """Compute the mean difference ``candidate - champion`` over prompts and its confidence
    interval.

    Example:
        candidate = [.8, .6, .9, .7] and champion = [.5, .6, .4, .6] have the differences [.3, 0.,
        .5, .1], whose mean is .225.

    Each end is the one-sided bound of ``mean_test``, where no prompt that was not seen lies beyond
    those seen.

    Args:
        candidate, champion: one finite value per prompt, in the same order, at least two.
        confidence: share of the interval, such as .95.

    Returns:
        ``(difference, low, high)``.

    Raises:
        ValueError: the vectors differ in shape, have fewer than 2 values or any that is not finite.
    """
    candidate = np.asarray(candidate, np.float64)
    champion = np.asarray(champion, np.float64)
    if candidate.shape != champion.shape or candidate.ndim != 1:
        raise ValueError(
            f"cannot pair shapes {candidate.shape} and {champion.shape}; pass two equally long"
            " vectors"
        )
    differences = candidate - champion
    count = len(differences)
    if count < 2:
        raise ValueError(
            f"an interval needs at least 2 prompts scored by both sides, got {count}; evaluate more"
            " prompts"
        )
    broken = int((~np.isfinite(differences)).sum())
    if broken:
        raise ValueError(f"{broken} of {count} pairs are not finite; filter them out first")
    error = (1 - confidence) / 2
    # The upper bound is the lower one with the sides swapped. Both in one call, [2, n]: of so few
    # numbers, an operation takes the same time for two rows as for one.
    both = np.stack([differences, -differences])
    low, swapped = compute_lower_bounds(both, both.min(axis=1), error)
    return float(differences.mean()), float(low), -float(swapped)


def compute_paired_tail(differences: np.ndarray, resamples: int, seed: int) -> float:
    """Compute the bootstrap p-value of "the mean is at most zero": the share of the resampled means
    that are.

    The resampled means are widened about their mean by sqrt(n / (n - 1)): the plug-in variance of n
    values is too small by that factor (Efron and Tibshirani, An Introduction to the Bootstrap,
    1993, ch. 5).

    Args:
        differences: one finite value per prompt, at least two.

    Raises:
        ValueError: there are fewer than 2 values or any that is not finite.
    """
    count = len(differences)
    if count < 2 or not np.isfinite(differences).all():
        raise ValueError(
            f"a test needs at least 2 finite differences, got {count}; evaluate more prompts"
        )
    mean = float(differences.mean())
    spread = _resample_means(differences, resamples, seed) - mean
    means = mean + spread * np.sqrt(count / (count - 1))
    return float((means <= 0).mean())


def reject_by_holm(p_values: Mapping[str, float], alpha: float) -> set[str]:
    """Return the hypotheses that are rejected, with a probability of at most ``alpha`` that any of
    them is true.

    Example:
        p-values {a: .01, b: .04, c: .02} with alpha = .05: .01 <= .05 / 3 and .02 <= .05 / 2 and
        .04 <= .05, so all three are rejected. With c = .03 only a is, as .03 > .05 / 2.

    Holm, A simple sequentially rejective multiple test procedure (Scandinavian Journal of
    Statistics 6, 1979): the smallest of m p-values against alpha / m, the next against alpha / (m -
    1) ..., until one is larger.
    """
    rejected: set[str] = set()
    for name, p_value in sorted(p_values.items(), key=lambda item: item[1]):
        if p_value > alpha / (len(p_values) - len(rejected)):
            break
        rejected.add(name)
    return rejected


def _resample_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Compute the means of bootstrap samples of the values, [resamples]."""
    # In chunks, whose size depends on the number of values alone: the same seed gives the same
    # numbers on every machine.
    generator = np.random.default_rng(seed)
    chunk = max(1, DRAWS_PER_CHUNK // len(values))
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]
    return np.concatenate(
        [
            values[generator.integers(len(values), size=(size, len(values)))].mean(axis=1)
            for size in sizes
        ]
    )


def pair_held_out_samples(metric: str, candidate: pa.Table, champion: pa.Table) -> pd.DataFrame:
    """Return a row per held-out sample of either side: the key, ``candidate`` and ``champion``; NaN
    where a side has no value.

    Example:
        The columns are prompt_id, sample, candidate, champion; a row is (17, 0, .84, .61).
    """
    ours = _select_held_out(metric, candidate).rename(columns={metric: "candidate"})
    theirs = _select_held_out(metric, champion).rename(columns={metric: "champion"})
    # An outer join: a sample that one side lacks is a failure of that side and must not vanish.
    # Sorted, because the bootstrap's result depends on the order of the rows.
    return ours.merge(theirs, on=KEY, how="outer").sort_values(KEY, ignore_index=True)


def compare_metric(
    metric: str,
    candidate: pa.Table,
    champion: pa.Table,
    *,
    confidence: float = 0.95,
) -> Comparison:
    """Compare one metric over the held-out split of two evaluations, in pairs
    (``evaluation_schema``).

    Example:
        Comparison(metric="reward", champion=.61, candidate=.68, difference=.07, low=.03, high=.11,
        prompts=200): with 95 % confidence the candidate is better, as ``low`` is above 0.

    Samples that only one side scored are left out; ``Comparison.prompts`` is the number of prompts
    that remain.

    Raises:
        ValueError: the metric is missing, a key occurs twice, or fewer than two prompts were scored
            by both sides.
    """
    means = average_over_prompts(metric, candidate, champion)
    difference, low, high = compute_paired_interval(
        means["candidate"].to_numpy(), means["champion"].to_numpy(), confidence
    )
    return Comparison(
        metric=metric,
        champion=float(means["champion"].mean()),
        candidate=float(means["candidate"].mean()),
        difference=difference,
        low=low,
        high=high,
        prompts=len(means),
    )


def average_over_prompts(metric: str, candidate: pa.Table, champion: pa.Table) -> pd.DataFrame:
    """Return ``candidate`` and ``champion``, a row per held-out prompt: means over the samples that
    both sides have a value of.

    Raises:
        ValueError: as ``compare_metric``.
    """
    pairs = pair_held_out_samples(metric, candidate, champion)
    # Samples of a prompt are not independent, so prompts are the units of the statistics, not
    # samples: more samples of a prompt must not look like more evidence.
    scored = pairs[np.isfinite(pairs[["candidate", "champion"]]).all(axis=1)]
    means = scored.groupby("prompt_id")[["candidate", "champion"]].mean()
    if len(means) < 2:
        raise ValueError(
            f"{metric}: both sides scored only {len(means)} of {pairs['prompt_id'].nunique()}"
            " held-out prompts, at least 2 are needed; see the scoring failures, or evaluate both"
            " on the same prompts"
        )
    return means


def _select_held_out(metric: str, table: pa.Table) -> pd.DataFrame:
    """Select the keys and one metric of the held-out samples; a null becomes NaN."""
    if metric not in table.column_names:
        raise ValueError(
            f"no column {metric!r} in this evaluation; it has {', '.join(table.column_names)}"
        )
    held_out = table.filter(pc.equal(table["split"], "held_out")).select([*KEY, metric])
    frame = held_out.to_pandas().astype({metric: np.float64})
    # A key that occurs twice would be joined with each row of the other side.
    duplicates = frame[frame.duplicated(KEY)][KEY].values.tolist()
    if duplicates:
        raise ValueError(
            f"(prompt_id, sample) = {duplicates[0]} occurs more than once in an evaluation; it must"
            " be unique"
        )
    return frame
