"""How far raters agree, beyond what chance would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def compute_krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Krippendorff's alpha for nominal data, any number of raters, and missing answers.

        alpha = 1 - (n - 1) * sum_u sum_{c != k} n_uc n_uk / (m_u - 1) / sum_{c != k} n_c n_k

    1 is full agreement, 0 what chance gives, and below 0 raters disagree systematically. Source:
    Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011, section E.

    Args:
        units: of each pair of pictures the answers that it got, in any order; those with fewer than
            two do not count.

    Returns:
        None where alpha is undefined: no pair has two answers, or all answers are the same.
    """
    tables = [Counter(answers) for answers in units if len(answers) > 1]
    totals: Counter[Hashable] = sum(tables, Counter())
    count = totals.total()
    expected = _count_disagreements(totals)
    if not expected:
        return None
    observed = sum(_count_disagreements(table) / (table.total() - 1) for table in tables)
    return 1 - (count - 1) * observed / expected


def _count_disagreements(counts: Counter[Hashable]) -> int:
    """Ordered pairs of answers that differ."""
    return counts.total() ** 2 - sum(count**2 for count in counts.values())
