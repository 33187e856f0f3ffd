"""How much better the candidate is than the champion on the same prompts, with a confidence
interval.

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

DRAWS_PER_CHUNK = 4_000_000
"""Bootstrap draws in memory at a time (32 MB)."""


def compute_paired_bootstrap(
    candidate: np.ndarray, champion: np.ndarray, resamples: int, confidence: float, seed: int
) -> tuple[float, float, float]:
    """Mean difference ``candidate - champion`` over prompts with its bootstrap interval.

    The percentile interval, widened about the mean by sqrt(n / (n - 1)): the plug-in variance of n
    prompts is too small by that factor (Efron and Tibshirani, An Introduction to the Bootstrap,
    1993, ch. 5).

    Args:
        candidate, champion: one finite value per prompt, in the same order, at least two.
        resamples: bootstrap samples.
        confidence: share of the interval, such as .95.
        seed: the same seed gives the same interval.

    Returns:
        ``(difference, low, high)``.

    Raises:
        ValueError: the vectors differ in shape, have fewer than 2 values or any that is not finite.
    """
    if candidate.shape != champion.shape or candidate.ndim != 1:
        raise ValueError(
            f"cannot pair shapes {candidate.shape} and {champion.shape}; pass two equally long"
            " vectors"
        )
    differences = np.asarray(candidate, dtype=np.float64) - np.asarray(champion, dtype=np.float64)
    count = len(differences)
    if count < 2:
        raise ValueError(
            f"an interval needs at least 2 prompts scored by both sides, got {count}; evaluate more"
            " prompts"
        )
    broken = int((~np.isfinite(differences)).sum())
    if broken:
        raise ValueError(f"{broken} of {count} pairs are not finite; filter them out first")
    difference = float(differences.mean())
    tails = np.quantile(
        _resample_means(differences, resamples, seed), [(1 - confidence) / 2, (1 + confidence) / 2]
    )
    low, high = difference + (tails - difference) * np.sqrt(count / (count - 1))
    return difference, float(low), float(high)


def compute_paired_tail(differences: np.ndarray, resamples: int, seed: int) -> float:
    """Bootstrap p-value of "the mean is at most zero": the share of the resampled means that are.

    The test that agrees with ``compute_paired_bootstrap``: it is below (1 - confidence) / 2 exactly
    where that interval lies above zero.

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
    means = mean + (_resample_means(differences, resamples, seed) - mean) * np.sqrt(
        count / (count - 1)
    )
    return float((means <= 0).mean())


def reject_by_holm(p_values: Mapping[str, float], alpha: float) -> set[str]:
    """The hypotheses that are rejected, with a probability of at most ``alpha`` that any of them is
    true.

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
    """A row per held-out sample of either side: the key, ``candidate`` and ``champion``; NaN where
    a side has no value.
    """
    sides = [
        _select_held_out(metric, table).rename(columns={metric: side})
        for side, table in _name_sides(candidate, champion)
    ]
    return sides[0].merge(sides[1], on=KEY, how="outer").sort_values(KEY, ignore_index=True)


def compare_metric(
    metric: str,
    candidate: pa.Table,
    champion: pa.Table,
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Paired comparison of one metric over the held-out split of two evaluations
    (``evaluation_schema``).

    Samples that only one side scored are left out; ``Comparison.prompts`` is the number of prompts
    that remain.

    Raises:
        ValueError: the metric is missing, a key occurs twice, or fewer than two prompts were scored
            by both sides.
    """
    means = average_over_prompts(metric, candidate, champion)
    difference, low, high = compute_paired_bootstrap(
        means["candidate"].to_numpy(), means["champion"].to_numpy(), resamples, confidence, seed
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
    """``candidate`` and ``champion``, a row per held-out prompt: means over the samples that both
    sides have a value of.

    Raises:
        ValueError: as ``compare_metric``.
    """
    pairs = pair_held_out_samples(metric, candidate, champion)
    scored = pairs[np.isfinite(pairs[["candidate", "champion"]]).all(axis=1)]
    means = scored.groupby("prompt_id")[["candidate", "champion"]].mean()
    if len(means) < 2:
        raise ValueError(
            f"{metric}: both sides scored only {len(means)} of {pairs['prompt_id'].nunique()}"
            " held-out prompts, at least 2 are needed; see the scoring failures, or evaluate both"
            " on the same prompts"
        )
    return means


def _name_sides(
    candidate: pa.Table, champion: pa.Table
) -> tuple[tuple[str, pa.Table], tuple[str, pa.Table]]:
    return ("candidate", candidate), ("champion", champion)


def _select_held_out(metric: str, table: pa.Table) -> pd.DataFrame:
    """The keys and one metric of the held-out samples; a null becomes NaN."""
    if metric not in table.column_names:
        raise ValueError(
            f"no column {metric!r} in this evaluation; it has {', '.join(table.column_names)}"
        )
    kept = table.filter(pc.equal(table["split"], "held_out")).select([*KEY, metric])
    frame = kept.to_pandas().astype({metric: np.float64})
    duplicates = frame[frame.duplicated(KEY)][KEY].values.tolist()
    if duplicates:
        raise ValueError(
            f"(prompt_id, sample) = {duplicates[0]} occurs more than once in an evaluation; it must"
            " be unique"
        )
    return frame
