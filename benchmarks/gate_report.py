"""The page and the picture of ``benchmarks.gate``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.promotion import PromotionConfig

RESULTS = Path(__file__).parent / "results" / "gate.md"
PICTURE = Path(__file__).parents[1] / "docs" / "static" / "gate.png"
NUMBERS = (16, 24, 64, 128)
"""Held-out prompts."""
RATCHET_NUMBERS = (64, 128)
REFUSED = "refused"
"""What the gate of today does with fewer prompts than it needs."""
RATCHET_NOISE = 0.2
"""Standard deviation of a guardrail's paired differences, in that of its prompts, of candidates
that differ from the champion by little more than a slow fall.
"""
GUARDRAIL_LOOKS = 20
"""Looks at a guardrail for each simulated year: a share of 2.5 % of 10,000 has a standard error of
.16 %, one of 500 of .7 %.
"""
DEEP_FALL = 2.5
"""Fall of the prompts that break while all others stay, in standard deviations of the prompts: from
the mean of a score from 0 to 1 to 0.
"""
OLD_TOLERANCE = 0.1
COLOURS = {"before": "#c8385a", "now": "#2f6fdf"}
Tables = Mapping[str, list[list[str]]]


def write_report(years: int, tables: Tables, paths: Mapping[str, np.ndarray]) -> None:
    """Write the page and the picture.

    Args:
        tables: the rows of each table, as ``benchmarks.gate.simulate_tables`` makes them.
        paths: [weeks], the fall of a guardrail by a ratchet, ``before`` and ``now``.
    """
    page = [*_format_gains(years, tables), *_format_falls(tables, years)]
    RESULTS.write_text("\n".join(page) + "\n")
    FigureCanvasAgg(plot_figure(tables, paths)).print_png(PICTURE, metadata={"Software": None})


def _format_gains(years: int, tables: Tables) -> list[str]:
    """Format the introduction and the tables about the reward."""
    promotion = PromotionConfig()
    numbers = [f"n = {prompts}" for prompts in NUMBERS]
    return [
        "# A year of the gate",
        "",
        (
            f"Written by `python -m benchmarks.gate --years {years}`. Every week a candidate meets"
            " the champion; *before → now* compares the gate of a percentile bootstrap at 2.5 % a"
            " look, on the same prompts and noise every week, with the gate of today, whose error"
            f" budget is {promotion.error_budget:g} in {promotion.looks_per_year} looks and whose"
            f" looks have new noise. Below {MIN_PROMPTS} prompts it refuses. Qualities count"
            " standard deviations of the prompts; a paired difference has a standard deviation of"
            " 1.4 of them, as the two sides' scores are independent."
        ),
        "",
        "![A year of the gate](../../docs/static/gate.png)",
        "",
        "## One look at a candidate that is no better, nominal error 2.5 %",
        "",
        *_format_table(["candidate", *numbers], tables["look"]),
        "",
        "## A year",
        "",
        (
            "False years: at least one promotion of a candidate that is no better. Gain: quality of"
            " the last champion above the first. Luck: by how much the stored reward of the last"
            " champion is too good, in standard errors; the gate of today scores it anew."
        ),
        "",
        *_format_table(["candidates", "n", "false years", "gain a year", "luck"], tables["year"]),
        "",
        *_format_costs(tables),
    ]


def _format_costs(tables: Tables) -> list[str]:
    """Format what a gain costs in prompts and samples."""
    return [
        "## What a gain costs",
        "",
        (
            "Candidates equal to the champion, and candidates spread by .1, by the held-out prompts"
            " (`prompts.held_out`) and the samples of each (`evaluation.samples`). The default of a"
            " recipe is 128 prompts with four samples. The samples of a prompt are independent"
            " here; where they are alike, more of them are worth less. *Ideal*: the uniformly most"
            " powerful test at the same share of the budget, which knows that scores are normal"
            " and how noisy they are, and so does not fear disasters. No test that keeps the budget"
            " finds more with as many samples. *Without a budget*: the gate before, but on"
            " new noise every week, as today; with its false years of equal candidates."
        ),
        "",
        *_format_table(
            [
                "n",
                "samples",
                "false years, equal",
                "gain a year, spread",
                "ideal gain",
                "gain without a budget",
                "its false years",
                "years with a promotion",
                "false years, spread",
            ],
            tables["frontier"],
        ),
        "",
    ]


def _format_falls(tables: Tables, years: int) -> list[str]:
    """Format the tables about guardrails."""
    promotion = PromotionConfig()
    numbers = [f"n = {prompts}" for prompts in NUMBERS]
    looks = GUARDRAIL_LOOKS * years
    error = 100 * math.sqrt(0.025 * 0.975 / looks)
    return [
        "## Guardrails that pass",
        "",
        (
            f"Before: the mean fell by at most {OLD_TOLERANCE:g}. Now: a fall of"
            f" {promotion.guardrail_tolerance.default:g} is ruled out with 97.5 % confidence. Falls"
            " count standard deviations of the champion's prompts as the look measures them. The"
            " paired differences have the standard deviation of the prompts; *on few prompts*:"
            f" one prompt in six falls by {DEEP_FALL:g}, and the others do not change. One in 16"
            " sets of 16 prompts has none that falls, so every test that passes an unchanged"
            f" guardrail there also passes 6 % of these falls: hence the {MIN_PROMPTS} prompts."
            f" Shares of {looks:,} looks, whose standard error at 2.5 % is {error:.2f} %."
        ),
        "",
        *_format_table(["guardrail", *numbers], tables["guardrail"]),
        "",
        "## Ratchet and drift",
        "",
        (
            "The reward of every candidate provably rises while a guardrail falls a little; the"
            f" paired differences have a standard deviation of {RATCHET_NOISE:g}. The anchor is the"
            f" first champion, with a cumulative tolerance of {promotion.anchor_tolerance:g}."
        ),
        "",
        *_format_table(
            ["candidates", "n", "promotions a year", "mean fall in a year", "largest fall"],
            tables["ratchet"],
        ),
    ]


def _format_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def plot_figure(tables: Tables, paths: Mapping[str, np.ndarray]) -> Figure:
    """Draw the false years of equal candidates, the gain of spread ones, and the ratchet."""
    style = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 2.8), layout="constrained")
        panels = figure.subplots(1, 3)
        years = [row for row in tables["year"] if REFUSED not in row[2]]
        equal = [row for row in years if row[0].startswith("equal")]
        _plot_pairs(panels[0], equal, 2)
        panels[0].axhline(100 * PromotionConfig().error_budget, color="grey", linewidth=0.8)
        panels[0].set_title("years with a false promotion, %", loc="left", fontsize=9)
        _plot_pairs(panels[1], [row for row in years if row[0].startswith("spread")], 3)
        panels[1].set_title("gain a year, spread by .1 sd", loc="left", fontsize=9)
        for name, path in paths.items():
            panels[2].plot(range(1, len(path) + 1), path, color=COLOURS[name], label=name)
        panels[2].set_title("fall of a guardrail by a ratchet, sd", loc="left", fontsize=9)
        panels[2].set_xlabel("week")
        panels[2].legend(frameon=False)
        return figure


def _plot_pairs(axes: Axes, rows: list[list[str]], column: int) -> None:
    """Draw the two numbers of a column ("before → now") as bars by the number of prompts."""
    pairs = [[float(text.strip(" %")) for text in row[column].split("→")] for row in rows]
    positions = np.arange(len(rows))
    for side, (label, color) in enumerate(COLOURS.items()):
        heights = [pair[side] for pair in pairs]
        axes.bar(positions + 0.4 * side - 0.2, heights, 0.36, label=label, color=color)
    axes.set_xticks(positions, [f"n = {row[1]}" for row in rows])
    # Room above the bars, or the legend would lie on one of them.
    axes.set_ylim(top=1.3 * max(max(pair) for pair in pairs))
    axes.legend(frameon=False, loc="upper center", ncols=len(COLOURS))
