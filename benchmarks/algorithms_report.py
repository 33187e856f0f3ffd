"""The table and the plot of ``benchmarks.algorithms``, from its results alone: ``python -m
benchmarks.algorithms_report``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "algorithms.json"
GOAL = 0.90
"""The held-out OCR score by which learning speeds are compared."""
READER = "tesseract"
"""The reader that no entry is trained on: a policy may pass the goal by pleasing ``ocr`` alone."""
READERS_GOAL = 0.92
OCR_GOAL = {"ocr": GOAL}
BOTH_GOALS = {"ocr": GOAL, READER: READERS_GOAL}
TITLES = {
    "policy_gradient": "Policy gradients: steps of a fresh trajectory",
    "forward_process": "Forward process: final samples only",
    "published": (
        "Published settings, made for large models and thousands of GPU-hours: all defaults of the"
        " algorithm"
    ),
    "reward_gradient": (
        "Gradients of the reward `recognizer`, a network that reads the picture; `ocr` is not"
        " trained on"
    ),
    "distillation": "From a teacher: the policy of diffusion_nft with the same seed",
    "students": (
        "Students of two denoising steps, evaluated with two: from the policy of"
        " diffusion_nft_quick, same seed"
    ),
    "offline": "Offline: samples of the base model, generated and scored once",
    "longer": "The same, given longer: those that had not passed .90",
    "collapse": (
        "Meant to go wrong, and not all of it did: what the guardrails and the drift alarm are for"
    ),
}
COLOURS = {
    "policy_gradient": "#2f6fdf",
    "forward_process": "#159a7a",
    "published": "#6b7280",
    "reward_gradient": "#0f7f9f",
    "distillation": "#e0791a",
    "students": "#b0860a",
    "offline": "#a24fc4",
    "longer": "#7a8a1f",
    "collapse": "#c8385a",
}
COLUMNS = 6
"""Panels in a row of the plot."""
Runs = Sequence[dict[str, Any]]
Curve = Sequence[dict[str, float]]


def write_report(results: Path = RESULTS) -> None:
    """Write the table and the plot beside the results."""
    results_of_runs = json.loads(results.read_text())
    groups = {
        kind: _group_by_entry([run for run in results_of_runs["runs"] if run["kind"] == kind])
        for kind in TITLES
    }
    results.with_suffix(".md").write_text(
        "\n".join(_format_page(results_of_runs["machine"], groups)) + "\n"
    )
    figure = _plot_figure({kind: runs for kind, runs in groups.items() if runs})
    # no name of the software: another version of matplotlib would change a picture that is alike
    FigureCanvasAgg(figure).print_png(results.with_suffix(".png"), metadata={"Software": None})


def _group_by_entry(runs: Runs) -> dict[str, Runs]:
    """Return the runs of each entry, a row of the table each."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        entries.setdefault(run["name"], []).append(run)
    return entries


def _format_page(machine: dict[str, Any], groups: dict[str, dict[str, Runs]]) -> list[str]:
    runs = [run for group in groups.values() for each in group.values() for run in each]
    base_ocr = fmean(run["before"]["ocr"] for run in runs)
    base_exact = fmean(run["before"]["exact_match"] for run in runs)
    lines = [
        "# Algorithms at equal time",
        "",
        (
            f"Written by `python -m benchmarks.algorithms` on {machine['cores']} cores of"
            f" {machine['cpu']}, one thread. Every run starts from the same base model, which"
            f" scores {base_ocr:.2f} and spells {base_exact:.2f} of 96 held-out strings exactly,"
            " and gets the stated CPU-seconds, in which rollouts, OCR and updates count. Means over"
            " the seeds, with the least and most in brackets; the standard error of one score is"
            " about .02. `ocr` is the reward unless a table names another, `tesseract` and"
            " `similarity` are never trained on. Entries: [algorithms.yaml](../algorithms.yaml)."
            f"{_name_other_machines(machine, groups)} Each seed has held-out strings of its own;"
            f" evaluations are 2 CPU-seconds apart or a fifth of what has passed"
            f"{_name_commits(runs)}. `{READER}` then: its score at the moment at which OCR passes"
            f" {GOAL:.2f}; the next column has the moment at which both have passed their goals."
            " Moments are on straight lines between evaluations. The columns ÷ best have the"
            " CPU-seconds before them as a share of those that a policy gradient takes to an OCR of"
            f" {GOAL:.2f}: the one that takes the fewest with all of its seeds, on the same"
            " processor."
        ),
        "",
        "![Held-out OCR over CPU-seconds](algorithms.png)",
    ]
    for kind, rows in groups.items():
        if rows:
            seconds = sorted(
                {f"{run['cpu_seconds']:.0f}" for each in rows.values() for run in each}
            )
            lines += [
                "",
                f"**{TITLES[kind]}** ({' or '.join(seconds)} CPU-seconds)",
                "",
                *_format_table(rows, groups["policy_gradient"]),
            ]
    return lines


def _find_best_policy_gradient(policy_gradients: dict[str, Runs], cpus: set[str]) -> float | None:
    """Return the fewest CPU-seconds to the goal of a policy gradient that reached it with every
    seed on the same processors; None if none did.
    """
    medians = []
    for runs in policy_gradients.values():
        seconds = _list_seconds_to_goals(runs, OCR_GOAL)
        # A median over some of the seeds is a lower bound, and CPU-seconds of another processor are
        # not those of the others.
        if len(seconds) == len(runs) and _list_cpus(runs) == cpus:
            medians.append(median(seconds))
    return min(medians, default=None)


def _list_cpus(runs: Runs) -> set[str]:
    return {run["cpu"] for run in runs}


def _name_commits(runs: Runs) -> str:
    # Each once, in the order of the page.
    return f" (measured at {', '.join(dict.fromkeys(run['commit'] for run in runs))})"


def _name_other_machines(machine: dict[str, Any], groups: dict[str, dict[str, Runs]]) -> str:
    """Return a sentence for each processor that is not the page's: its rows had other seconds."""
    # A set that keeps the order of the page.
    names: dict[str, dict[str, None]] = {}
    for rows in groups.values():
        for row, runs in rows.items():
            for run in runs:
                if run["cpu"] != machine["cpu"]:
                    names.setdefault(run["cpu"], {})[f"`{row}`"] = None
    return "".join(
        f" On {cpu}, whose CPU-seconds are not those of the others: {', '.join(rows)}."
        for cpu, rows in names.items()
    )


def _format_table(rows: dict[str, Runs], policy_gradients: dict[str, Runs]) -> list[str]:
    head = [
        "entry",
        "ocr",
        "exact",
        "tesseract",
        "similarity",
        "velocity drift",
        f"CPU-s to {GOAL:.2f}",
        "÷ best",
        f"{READER} then",
        f"CPU-s to {READER} {READERS_GOAL:.2f} too",
        "÷ best",
        "steps",
        "alarm",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, runs in rows.items():
        alarms = sum(bool(run["alarms"] or run["stopped"]) for run in runs)
        best = _find_best_policy_gradient(policy_gradients, _list_cpus(runs))
        cells = [
            row,
            *_format_scores([run["after"] for run in runs]),
            _format_seconds(runs, OCR_GOAL),
            _format_ratio(runs, OCR_GOAL, best),
            _format_spread([interpolate_score(run["curve"], OCR_GOAL, READER) for run in runs]),
            _format_seconds(runs, BOTH_GOALS),
            _format_ratio(runs, BOTH_GOALS, best),
            f"{fmean(run['steps'] for run in runs):.0f}",
            f"{alarms} of {len(runs)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        teachers = [run["teacher"] for run in runs if "teacher" in run]
        if teachers:
            lines.append(
                "| "
                + " | ".join(
                    [f"teacher of {row}, evaluated alike", *_format_scores(teachers), *"–––––––"]
                )
                + " |"
            )
    return lines


def _format_scores(scores_of_runs: Sequence[dict[str, float]]) -> list[str]:
    spreads = [
        _format_spread([scores.get(key) for scores in scores_of_runs])
        for key in ("ocr", "exact_match", "tesseract", "similarity")
    ]
    return [*spreads, f"{fmean(scores['velocity_drift'] for scores in scores_of_runs):.2f}"]


def _format_spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{known[0]:.2f}" if known else "–"
    return f"{fmean(known):.2f} ({min(known):.2f}–{max(known):.2f})"


def _format_seconds(runs: Runs, goals: dict[str, float]) -> str:
    """Median over the seeds that reached all goals, interpolated between evaluations."""
    reached = _list_seconds_to_goals(runs, goals)
    if not reached:
        return "–"
    # a median over some of the seeds is a lower bound, so how many is shown
    count = "" if len(reached) == len(runs) else f" ({len(reached)} of {len(runs)})"
    # A tenth of the fastest entries' seconds is less than a second.
    seconds = median(reached)
    return f"{seconds:.0f}{count}" if seconds >= 10 else f"{seconds:.1f}{count}"


def _format_ratio(runs: Runs, goals: dict[str, float], best: float | None) -> str:
    """Format the median over the seeds as a share of ``best``, where all seeds reached the goal."""
    reached = _list_seconds_to_goals(runs, goals)
    if best is None or len(reached) < len(runs):
        return "–"
    return f"{median(reached) / best:.2f}"


def _list_seconds_to_goals(runs: Runs, goals: dict[str, float]) -> list[float]:
    seconds_of_runs = [interpolate_score(run["curve"], goals, "cpu_seconds") for run in runs]
    return [seconds for seconds in seconds_of_runs if seconds is not None]


def interpolate_seconds(curve: Curve, goal: float) -> float | None:
    """CPU-seconds at which a learning curve first passes an OCR score, None if it never does."""
    return interpolate_score(curve, {"ocr": goal}, "cpu_seconds")


def interpolate_score(curve: Curve, goals: dict[str, float], score: str) -> float | None:
    """Return a score at the first moment at which a learning curve has passed all goals, on
    straight lines between evaluations; None if it never does or they were not measured there.

    Args:
        goals: values by the names of scores.
    """
    # The first crossing: a noisy curve may fall below the goals again.
    for earlier, later in zip(curve, curve[1:], strict=False):
        # A score that was not measured at an evaluation has not passed its goal there.
        if all(later.get(name, -math.inf) >= goal for name, goal in goals.items()):
            # Without the point before there is no line to interpolate on.
            if not {*goals, score} <= earlier.keys() & later.keys():
                return None
            # The one that is passed last; one that was passed before does not count.
            shares = [
                (goal - earlier[name]) / (later[name] - earlier[name])
                for name, goal in goals.items()
                if earlier[name] < goal
            ]
            # None where the base model has passed them all.
            share = max(shares, default=0.0)
            return earlier[score] + share * (later[score] - earlier[score])
    return None


def _plot_figure(groups: dict[str, dict[str, Runs]]) -> Figure:
    """A panel for every entry, each group on rows of its own: held-out OCR over CPU-seconds, a line
    for every seed.
    """
    # a group starts a row of its own, and its last row may have empty panels
    lines = [(kind, names) for kind, group in groups.items() for names in _layout_rows(list(group))]
    with matplotlib.rc_context(
        {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(COLUMNS * 2.1, len(lines) * 1.75), layout="constrained", dpi=110)
        axes = figure.subplots(len(lines), COLUMNS, sharex="row", sharey=True, squeeze=False)
        for row, (kind, names) in zip(axes, lines, strict=True):
            for panel, name in zip(row, names, strict=False):
                _plot_panel(panel, name, groups[kind][name], COLOURS[kind])
            for panel in row[len(names) :]:
                panel.set_visible(False)
        figure.supxlabel("CPU-seconds of rollouts, OCR and updates")
        figure.supylabel("held-out OCR score")
        return figure


def _layout_rows(names: list[str]) -> list[list[str]]:
    return [names[start : start + COLUMNS] for start in range(0, len(names), COLUMNS)]


def _plot_panel(panel: Axes, name: str, runs: Runs, colour: str) -> None:
    panel.set_title(name, fontsize=8.5, loc="left")
    panel.axhline(GOAL, color="#9aa3af", linewidth=0.7, linestyle=":")
    for run in runs:
        panel.plot(
            [point["cpu_seconds"] for point in run["curve"]],
            [point["ocr"] for point in run["curve"]],
            color=colour,
            lw=1.2,
        )
    panel.set_ylim(0, 1)
    panel.tick_params(length=2)


if __name__ == "__main__":
    write_report()
