"""How much better the candidate is than the champion on the same prompts, with a confidence interval.

Both sides have the same prompts and noise, so the differences are paired and the spread between easy and hard prompts cancels.
Samples of one prompt are not independent: they are averaged, and prompts are resampled.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.records import Comparison

KEY = ["prompt_id", "sample"]
DRAWS_PER_CHUNK = 4_000_000
"""Bootstrap draws in memory at a time (32 MB)."""


def paired_bootstrap(
    candidate: np.ndarray, champion: np.ndarray, resamples: int, confidence: float, seed: int
) -> tuple[float, float, float]:
    """Mean difference ``candidate - champion`` over prompts with its bootstrap interval.

    The percentile interval, widened about the mean by sqrt(n / (n - 1)): the plug-in variance of n prompts is too small by
    that factor (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 5).

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
        raise ValueError(f"cannot pair shapes {candidate.shape} and {champion.shape}; pass two equally long vectors")
    differences = np.asarray(candidate, dtype=np.float64) - np.asarray(champion, dtype=np.float64)
    count = len(differences)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 prompts scored by both sides, got {count}; evaluate more prompts")
    if broken := int((~np.isfinite(differences)).sum()):
        raise ValueError(f"{broken} of {count} pairs are not finite; filter them out first")
    difference = float(differences.mean())
    tails = np.quantile(_resampled_means(differences, resamples, seed), [(1 - confidence) / 2, (1 + confidence) / 2])
    low, high = difference + (tails - difference) * np.sqrt(count / (count - 1))
    return difference, float(low), float(high)


def _resampled_means(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    chunk = max(1, DRAWS_PER_CHUNK // len(values))
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]
    return np.concatenate([values[generator.integers(len(values), size=(size, len(values)))].mean(axis=1) for size in sizes])


def held_out_pairs(metric: str, candidate: pa.Table, champion: pa.Table) -> pd.DataFrame:
    """A row per held-out sample of either side: the key, ``candidate`` and ``champion``; NaN where a side has no value."""
    sides = [_held_out(metric, table).rename(columns={metric: side}) for side, table in _sides(candidate, champion)]
    return sides[0].merge(sides[1], on=KEY, how="outer").sort_values(KEY, ignore_index=True)


def compare(
    metric: str, candidate: pa.Table, champion: pa.Table, *, resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Comparison:
    """Paired comparison of one metric over the held-out split of two evaluations (``evaluation_schema``).

    Samples that only one side scored are left out; ``Comparison.prompts`` is the number of prompts that remain.

    Raises:
        ValueError: the metric is missing, a key occurs twice, or fewer than two prompts were scored by both sides.
    """
    pairs = held_out_pairs(metric, candidate, champion)
    scored = pairs[np.isfinite(pairs[["candidate", "champion"]]).all(axis=1)]
    means = scored.groupby("prompt_id")[["candidate", "champion"]].mean()
    if len(means) < 2:
        raise ValueError(
            f"{metric}: both sides scored only {len(means)} of {pairs['prompt_id'].nunique()} held-out prompts, at least 2 are "
            "needed; see the scoring failures, or evaluate both on the same prompts"
        )
    difference, low, high = paired_bootstrap(
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


def _sides(candidate: pa.Table, champion: pa.Table) -> tuple[tuple[str, pa.Table], tuple[str, pa.Table]]:
    return ("candidate", candidate), ("champion", champion)


def _held_out(metric: str, table: pa.Table) -> pd.DataFrame:
    """The keys and one metric of the held-out samples; a null becomes NaN."""
    if metric not in table.column_names:
        raise ValueError(f"no column {metric!r} in this evaluation; it has {', '.join(table.column_names)}")
    kept = table.filter(pc.equal(table["split"], "held_out")).select([*KEY, metric])
    frame = kept.to_pandas().astype({metric: np.float64})
    if duplicates := frame[frame.duplicated(KEY)][KEY].values.tolist():
        raise ValueError(f"(prompt_id, sample) = {duplicates[0]} occurs more than once in an evaluation; it must be unique")
    return frame
