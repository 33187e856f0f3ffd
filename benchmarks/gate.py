"""A year of the gate, simulated with its own functions: ``python -m benchmarks.gate [--years
400]``.

Every week a candidate meets the champion on n held-out prompts; the winner is champion from then
on. Scores lie between 0 and 1, with a mean of .5 and a standard deviation of .2 over prompts, the
same for both sides and independent of each other given the prompt: all numbers of the table count
standard deviations of the prompts. The table and the picture go to ``benchmarks/results/gate.md``
and ``docs/static/gate.png``.

The gate before it had an error budget is simulated beside it: a percentile bootstrap at 2.5 % a
look, the same prompts and noise every week, guardrails by their means.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.gate_report import (
    DEEP_FALL,
    GUARDRAIL_LOOKS,
    NUMBERS,
    OLD_TOLERANCE,
    RATCHET_NOISE,
    RATCHET_NUMBERS,
    REFUSED,
    write_report,
)
from ebbflow.evaluation.look import compute_look_error
from ebbflow.evaluation.statistics import (
    compute_disaster_p_values,
    compute_fall_p_values,
    compute_gain_p_values,
)
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.promotion import PromotionConfig

WEEKS = 52
FRONTIER = (
    (64, 1),
    (64, 4),
    (64, 8),
    (128, 1),
    (128, 4),
    (128, 8),
    (256, 1),
    (256, 2),
    (256, 4),
    (512, 1),
)
"""Held-out prompts, and samples of each."""
MEAN = 0.5
DEVIATION = 0.2
ONE_LOOK = 0.025
"""Nominal one-sided error of a single look."""
GAIN = 0.02
DISASTER = 0.38
DISASTER_SHARE = 0.05
"""A candidate with disasters gains a little on most prompts and loses as much on few: .95 * .02 =
.05 * .38.
"""
RESAMPLES = 1000
GUARDRAIL_NOISE = 1.0
"""Standard deviation of a guardrail's paired differences, in that of its prompts."""


class Year(NamedTuple):
    """What a year of looks ended with, a value for each simulated year.

    Attributes:
        promotions: number of promotions.
        false_promotions: number of promotions of a candidate that is not better.
        gain: true quality of the last champion above the first one's.
        curse: by how much the champion's stored reward is too good, in standard errors of a mean.
    """

    promotions: np.ndarray
    false_promotions: np.ndarray
    gain: np.ndarray
    curse: np.ndarray


class Ratchet(NamedTuple):
    """A year of candidates that gain in the reward while a guardrail falls.

    Attributes:
        promotions: number of promotions.
        fall: of the guardrail, from the first champion to the last.
        path: [weeks], mean fall after each week.
    """

    promotions: np.ndarray
    fall: np.ndarray
    path: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--years", type=int, default=400, help="simulated years of each row")
    years = parser.parse_args().years
    tables = simulate_tables(years)
    paths = {
        name: simulate_ratchet(years // 10, 64, 0.04, old=old).path
        for name, old in (("before", True), ("now", False))
    }
    write_report(years, tables, paths)


def simulate_tables(years: int) -> dict[str, list[list[str]]]:
    """Simulate every table of the page; each row is a list of cells."""
    tables: dict[str, list[list[str]]] = {}
    jobs: dict[str, Callable[[int], Iterator[list[str]]]] = {
        "look": _simulate_one_looks,
        "year": _simulate_years,
        "frontier": _simulate_frontier,
        "guardrail": _simulate_guardrails,
        "ratchet": _simulate_ratchets,
    }
    for name, simulate in tqdm(jobs.items(), unit="table"):
        tables[name] = list(simulate(years))
    return tables


def draw_scores(
    generator: np.random.Generator, quality: np.ndarray, prompts: int, samples: int = 1
) -> np.ndarray:
    """Draw the scores of policies of a quality, [Y, prompts]: the mean of ``samples`` of each
    prompt, whose spread is all noise.
    """
    noise = generator.normal(size=(len(quality), prompts)) / np.sqrt(samples)
    return np.clip(MEAN + DEVIATION * (quality[:, None] + noise), 0.0, 1.0)


def add_disasters(generator: np.random.Generator, champion: np.ndarray) -> np.ndarray:
    """Return the scores of a candidate with many small gains and few disasters, whose true mean
    difference is 0.
    """
    disasters = generator.random(champion.shape) < DISASTER_SHARE
    return champion + np.where(disasters, -DISASTER, GAIN)


def prove_gain(
    candidate: np.ndarray, champion: np.ndarray, error: float, lowest: float | None = 0.0
) -> np.ndarray:
    """Decide as the gate does whether the reward rose, bool [Y]."""
    differences = candidate - champion
    spread = differences.std(axis=1)
    # A mean below one standard error is never below an error of 10 %: it is not worth an integral.
    plausible = differences.mean(axis=1) * np.sqrt(differences.shape[1]) > spread
    passed = np.zeros(len(differences), bool)
    if plausible.any():
        p_values = compute_gain_p_values(candidate[plausible], champion[plausible])
        passed[plausible] = p_values < error
    if passed.any():
        p_values = compute_disaster_p_values(candidate[passed], champion[passed], lowest)
        passed[passed] = p_values < error
    return passed


def prove_gain_with_known_noise(
    candidate: np.ndarray, champion: np.ndarray, error: float, samples: int
) -> np.ndarray:
    """Decide by the uniformly most powerful test of normal scores whose noise is known, bool [Y]:
    no test with the same error finds more.
    """
    differences = candidate - champion
    spread = DEVIATION * np.sqrt(2 / (samples * differences.shape[1]))
    return np.asarray(differences.mean(axis=1) > spread * NormalDist().inv_cdf(1 - error))


def prove_gain_by_bootstrap(candidate: np.ndarray, champion: np.ndarray) -> np.ndarray:
    """Decide as the gate did before: the percentile interval of the mean, widened about it by
    sqrt(n / (n - 1)), lies above zero, bool [Y].
    """
    differences = candidate - champion
    count = differences.shape[1]
    # The same resamples for all years: what is counted over years does not depend on it.
    generator = np.random.default_rng(1)
    weights = generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    low = np.quantile(differences @ weights.T, ONE_LOOK, axis=1)
    mean = differences.mean(axis=1)
    return np.asarray(mean + (low - mean) * np.sqrt(count / (count - 1)) > 0)


def simulate_year(
    years: int,
    prompts: int,
    *,
    offset: float = 0.0,
    spread: float = 0.0,
    old: bool = False,
    unlimited: bool = False,
    samples: int = 1,
    disasters: bool = False,
    ideal: bool = False,
    seed: int = 0,
) -> Year:
    """Simulate years of weekly candidates.

    Args:
        offset, spread: mean and standard deviation of the candidates' true quality, relative to
            that of the first champion.
        old: as the gate was before: the champion keeps the scores that promoted it.
        unlimited: decide as the gate did before, without a budget, but on new noise.
        disasters: candidates are those of ``add_disasters`` instead.
        ideal: decide by ``prove_gain_with_known_noise``.
    """
    generator = np.random.default_rng([seed, prompts])
    promotion = PromotionConfig()
    quality = np.zeros(years)
    scores = draw_scores(generator, quality, prompts, samples)
    first_error = DEVIATION / np.sqrt(prompts * samples)
    stored = scores
    promotions = np.zeros(years, int)
    false_promotions = np.zeros(years, int)
    spent = 0.0
    for _ in range(WEEKS):
        candidate_quality = offset + spread * generator.normal(size=years)
        # Scored anew beside the candidate, unless the gate is the old one.
        champion = stored if old else draw_scores(generator, quality, prompts, samples)
        if disasters:
            candidate = add_disasters(generator, champion)
            candidate_quality = quality
        else:
            candidate = draw_scores(generator, candidate_quality, prompts, samples)
        if old or unlimited:
            passed = prove_gain_by_bootstrap(candidate, champion)
        else:
            error = compute_look_error(promotion, spent)
            spent += error
            if ideal:
                passed = prove_gain_with_known_noise(candidate, champion, error, samples)
            else:
                passed = prove_gain(candidate, champion, error)
        promotions += passed
        false_promotions += passed & (candidate_quality <= quality)
        stored = np.where(passed[:, None], candidate, stored)
        quality = np.where(passed, candidate_quality, quality)
    curse = (stored.mean(axis=1) - MEAN) / DEVIATION - quality
    return Year(promotions, false_promotions, quality, curse * DEVIATION / first_error)


def simulate_ratchet(
    years: int, prompts: int, fall: float, *, old: bool = False, seed: int = 0
) -> Ratchet:
    """Simulate years of candidates whose reward provably rises every week while a guardrail falls
    by ``fall`` standard deviations of its prompts.
    """
    generator = np.random.default_rng([seed, prompts])
    promotion = PromotionConfig()
    tolerance = promotion.guardrail_tolerance.default
    assert promotion.anchor_tolerance is not None
    level = np.zeros(years)
    promotions = np.zeros(years, int)
    path = []
    for _ in range(WEEKS):
        easiness = generator.normal(size=(years, prompts))
        champion, candidate, anchor = (
            easiness
            + below[:, None]
            + RATCHET_NOISE / np.sqrt(2) * generator.normal(size=(years, prompts))
            for below in (level, level - fall, np.zeros(years))
        )
        if old:
            passed = (candidate - champion).mean(axis=1) >= -OLD_TOLERANCE * champion.std(axis=1)
        else:
            passed = _prove_small_fall(candidate, champion, tolerance)
            passed &= _prove_small_fall(candidate, anchor, promotion.anchor_tolerance)
        promotions += passed
        level = np.where(passed, level - fall, level)
        path.append(-level.mean())
    return Ratchet(promotions, -level, np.array(path))


def simulate_guardrail(
    repetitions: int,
    prompts: int,
    fall: float,
    *,
    old: bool = False,
    concentrated: bool = False,
    seed: int = 0,
) -> float:
    """Simulate one comparison of a guardrail that truly fell by ``fall``; return the share that
    passes.

    Args:
        fall: in standard deviations of the champion's prompts as the look measures them, as a
            tolerance is.
        concentrated: all of the fall is one of ``DEEP_FALL`` on few prompts.
    """
    generator = np.random.default_rng([seed, prompts])
    shape = (repetitions, prompts)
    # Paired differences with GUARDRAIL_NOISE: half of the variance of each side is its own.
    own = GUARDRAIL_NOISE / np.sqrt(2)
    easiness = np.sqrt(1 - own**2) * generator.normal(size=shape)
    champion = easiness + own * generator.normal(size=shape)
    mean_fall = fall * champion.std(axis=1, ddof=1, keepdims=True)
    if concentrated:
        # Without noise, which would show a fall on prompts that did not fall.
        broken = generator.random(shape) < mean_fall / DEEP_FALL
        candidate = champion - np.where(broken, DEEP_FALL, 0.0)
    else:
        candidate = easiness + own * generator.normal(size=shape) - mean_fall
    if old:
        passed = (candidate - champion).mean(axis=1) >= -OLD_TOLERANCE * champion.std(axis=1)
    else:
        passed = _prove_small_fall(
            candidate, champion, PromotionConfig().guardrail_tolerance.default
        )
    return float(passed.mean())


def _prove_small_fall(candidate: np.ndarray, champion: np.ndarray, share: float) -> np.ndarray:
    """Decide as the gate does whether a fall by a share of the champion's spread is ruled out."""
    tolerance = share * champion.std(axis=1, ddof=1)
    return compute_fall_p_values(candidate, champion, tolerance) < ONE_LOOK


def simulate_one_look(repetitions: int, prompts: int, kind: str) -> dict[str, float]:
    """Simulate single looks at a candidate that is no better; return the share that passes by each
    test, at a nominal error of 2.5 %.
    """
    generator = np.random.default_rng([2, prompts])
    champion = draw_scores(generator, np.zeros(repetitions), prompts)
    lowest: float | None = 0.0
    if kind == "equal":
        candidate = draw_scores(generator, np.zeros(repetitions), prompts)
    elif kind == "heavy tails":
        # No range is known: Student's t with 3 degrees of freedom.
        lowest = None
        candidate = champion + 0.1 * generator.standard_t(3, size=champion.shape)
    else:
        lowest = 0.0 if kind == "disasters" else None
        champion = generator.uniform(0.4, 0.9, size=champion.shape)
        candidate = add_disasters(generator, champion)
    return {
        "before": float(prove_gain_by_bootstrap(candidate, champion).mean()),
        "now": float(prove_gain(candidate, champion, ONE_LOOK, lowest).mean()),
    }


KINDS = {
    "equal": "equal",
    "heavy tails": "equal, differences with heavy tails, range unknown",
    "disasters": "many small gains, 5 % disasters, scores from 0 to 1",
    "disasters, range unknown": "the same, range unknown",
}


def _simulate_one_looks(years: int) -> Iterator[list[str]]:
    for kind, text in KINDS.items():
        cells = [simulate_one_look(10 * years, prompts, kind) for prompts in NUMBERS]
        yield [
            text,
            *(
                _format_change(prompts, _percent(cell["before"]), _percent(cell["now"]))
                for prompts, cell in zip(NUMBERS, cells, strict=True)
            ),
        ]


ROWS: dict[str, Callable[..., Year]] = {
    "equal to the champion": simulate_year,
    "worse by .1": partial(simulate_year, offset=-0.1),
    "spread by .1": partial(simulate_year, spread=0.1),
    "disasters, true mean 0": partial(simulate_year, disasters=True),
}


def _simulate_years(years: int) -> Iterator[list[str]]:
    for name, simulate in ROWS.items():
        for prompts in NUMBERS:
            before = simulate(years, prompts, old=True)
            after = simulate(years, prompts)
            yield [
                name,
                str(prompts),
                *(
                    _format_change(prompts, form(one), form(other))
                    for form, one, other in (
                        (_format_share, before.false_promotions, after.false_promotions),
                        (_format_gain, before.gain, after.gain),
                        (_format_curse, before.curse, after.curse),
                    )
                ),
            ]


def _format_change(prompts: int, before: str, now: str) -> str:
    """Format a cell: the gate of today refuses whatever it sees of too few prompts."""
    return f"{before} → {now if prompts >= MIN_PROMPTS else REFUSED}"


def _format_share(values: np.ndarray) -> str:
    return _percent(float((values > 0).mean()))


def _format_gain(values: np.ndarray) -> str:
    return f"{values.mean():+.3f}"


def _format_curse(values: np.ndarray) -> str:
    return f"{values.mean():.2f}"


def _simulate_frontier(years: int) -> Iterator[list[str]]:
    for prompts, samples in FRONTIER:
        equal = simulate_year(years, prompts, samples=samples)
        spread = simulate_year(years, prompts, samples=samples, spread=0.1)
        ideal = simulate_year(years, prompts, samples=samples, spread=0.1, ideal=True)
        without_budget = partial(simulate_year, years, prompts, samples=samples, unlimited=True)
        yield [
            str(prompts),
            str(samples),
            _format_share(equal.false_promotions),
            _format_gain(spread.gain),
            _format_gain(ideal.gain),
            _format_gain(without_budget(spread=0.1).gain),
            _format_share(without_budget().false_promotions),
            _format_share(spread.promotions),
            _format_share(spread.false_promotions),
        ]


def _simulate_guardrails(years: int) -> Iterator[list[str]]:
    tolerance = PromotionConfig().guardrail_tolerance.default
    # Of the gate before and of today: each is asked for a fall by its own tolerance.
    falls: dict[str, tuple[float, float, bool]] = {
        "unchanged": (0.0, 0.0, False),
        "fell by the tolerance": (OLD_TOLERANCE, tolerance, False),
        "the same, all of it on few prompts": (OLD_TOLERANCE, tolerance, True),
        "fell by twice the tolerance": (2 * OLD_TOLERANCE, 2 * tolerance, False),
    }
    looks = GUARDRAIL_LOOKS * years
    for name, (old_fall, fall, concentrated) in falls.items():
        simulate = partial(simulate_guardrail, looks, concentrated=concentrated)
        yield [
            name,
            *(
                _format_change(
                    prompts,
                    _percent(simulate(prompts, old_fall, old=True)),
                    _percent(simulate(prompts, fall)),
                )
                for prompts in NUMBERS
            ),
        ]


def _simulate_ratchets(years: int) -> Iterator[list[str]]:
    for name, fall in (("ratchet: .04 a week", 0.04), ("drift: .01 a week", 0.01)):
        for prompts in RATCHET_NUMBERS:
            before = simulate_ratchet(years // 10, prompts, fall, old=True)
            after = simulate_ratchet(years // 10, prompts, fall)
            yield [
                name,
                str(prompts),
                f"{before.promotions.mean():.1f} → {after.promotions.mean():.1f}",
                f"{before.fall.mean():.2f} → {after.fall.mean():.2f}",
                f"{before.fall.max():.2f} → {after.fall.max():.2f}",
            ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main()
