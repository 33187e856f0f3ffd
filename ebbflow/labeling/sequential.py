"""A test of "the candidate is preferred" that stays valid when it is looked at after every answer.

The outcomes are independent coin flips with probability p of the candidate; ties are no outcomes,
as in the sign test. The test of p = 1/2 is the mixture sequential probability ratio test with the
uniform prior: after s flips for the candidate and f for the champion

    M = integral of p^s (1 - p)^f dp / (1/2)^(s + f) = 2^(s + f) B(s + 1, f + 1)

is a martingale with mean 1 if p = 1/2, so that it ever reaches 1 / error_rate with a probability of
at most error_rate (Ville's inequality). The same inequality for every p gives a confidence
sequence.

Sources: Robbins, Statistical methods related to the law of the iterated logarithm, Annals of
Mathematical Statistics 41, 1970; Johari, Koomen, Pekelis and Walsh, Always Valid Inference,
Operations Research 70, 2022; the beta-binomial form: Lindon and Malek, Anytime-Valid Inference for
Multinomial Count Data, NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, lgamma, log

HALVINGS = 40
"""Bisection steps; they find an edge in [0, 1] to 1e-12."""


@dataclass(frozen=True)
class SequentialTest:
    """The test after all outcomes so far.

    Example:
        Nine outcomes for the candidate, then one for the champion, at an error rate of .05::

            SequentialTest(candidate=9, champion=1, low=0.455, high=0.9995, p_value=0.0195,
                           decided_after=8, preferred="candidate")

    Attributes:
        candidate: outcomes for the candidate.
        champion: outcomes for the champion.
        low, high: the confidence sequence of p, at the level ``1 - error_rate`` at all times
            together.
        p_value: of p = 1/2, valid at all times: 1 over the largest M so far.
        decided_after: number of outcomes at which M first reached ``1 / error_rate``; None if it
            never did.
        preferred: the side that had more outcomes then.
    """

    candidate: int
    champion: int
    low: float
    high: float
    p_value: float
    decided_after: int | None
    preferred: str | None


def run_sequential_test(outcomes: Sequence[bool], error_rate: float) -> SequentialTest:
    """Run the test on outcomes in the order in which they came; True is one for the candidate.

    Raises:
        ValueError: the error rate is not between 0 and 1.
    """
    if not 0 < error_rate < 1:
        raise ValueError(f"error_rate = {error_rate} is not between 0 and 1; 0.05 is usual")
    counts = [0, 0]
    largest = -inf
    decided_after = None
    preferred = None
    for number, outcome in enumerate(outcomes, start=1):
        counts[outcome] += 1  # False is index 0, the champion
        # The largest M so far, not the newest: Ville's inequality bounds the maximum, so a decision
        # stays decided.
        largest = max(largest, compute_log_mixture(counts[True], counts[False]))
        if decided_after is None and largest >= -log(error_rate):
            decided_after = number
            preferred = "candidate" if counts[True] > counts[False] else "champion"
    low, high = find_confidence_interval(counts[True], counts[False], error_rate)
    return SequentialTest(
        counts[True], counts[False], low, high, min(1.0, exp(-largest)), decided_after, preferred
    )


def compute_log_mixture(successes: int, failures: int, p: float = 0.5) -> float:
    """Return the logarithm of M against a probability p in (0, 1)."""
    # Logarithms: factors such as 2^(s + f) leave the range of floats after a thousand outcomes.
    beta = lgamma(successes + 1) + lgamma(failures + 1) - lgamma(successes + failures + 2)
    return beta - successes * log(p) - failures * log(1 - p)


def find_confidence_interval(
    successes: int, failures: int, error_rate: float
) -> tuple[float, float]:
    """Return the interval of all p that M does not reject. The probability that the interval ever
    misses the true p is at most ``error_rate``.
    """
    count = successes + failures
    # M is smallest at the observed share, so the interval is around it.
    share = successes / count if count else 0.5
    low = _find_interval_edge(successes, failures, error_rate, share, 0.0)
    high = _find_interval_edge(successes, failures, error_rate, share, 1.0)
    return low, high


def _find_interval_edge(
    successes: int, failures: int, error_rate: float, inside: float, outside: float
) -> float:
    """Return where M, which rises with the distance from the observed share, reaches
    1 / error_rate; ``outside`` if it does not.
    """
    # All outcomes are for one side: the share is the end of [0, 1] itself.
    if inside == outside:
        return outside
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        if compute_log_mixture(successes, failures, middle) < -log(error_rate):
            inside = middle
        else:
            outside = middle
    return outside
