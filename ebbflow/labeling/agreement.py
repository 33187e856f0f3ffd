"""How far raters agree, beyond what chance would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def compute_krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Return Krippendorff's alpha for nominal data, any number of raters, and missing answers.

        alpha = 1 - (n - 1) * sum_u sum_{c != k} n_uc n_uk / (m_u - 1) / sum_{c != k} n_c n_k

    1 is full agreement, 0 is what chance gives, and below 0 raters disagree systematically.
    Source: Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011, section E.

    Example:
        >>> compute_krippendorff_alpha([["a", "a"], ["b", "b"], ["a", "b"]])
        0.4444444444444444

    Args:
        units: the answers to each pair of pictures, in any order. Pairs with fewer than two answers
            do not count.

    Returns:
        None where alpha is undefined: no pair has two answers, or all answers are the same.
    """
    # One answer agrees with nothing and disagrees with nothing.
    tables = [Counter(answers) for answers in units if len(answers) > 1]
    totals: Counter[Hashable] = sum(tables, Counter())
    count = totals.total()
    expected = _count_disagreements(totals)
    # All answers are the same: chance would give full agreement, too.
    if not expected:
        return None
    observed = sum(_count_disagreements(table) / (table.total() - 1) for table in tables)
    return 1 - (count - 1) * observed / expected


def _count_disagreements(counts: Counter[Hashable]) -> int:
    """Return the number of ordered pairs of answers that differ."""
    return counts.total() ** 2 - sum(count**2 for count in counts.values())
