"""The report's charts as inline SVG, and a stage's timeline as PNG.

In the SVG, text stays text and colours are CSS variables, so the page's light and dark themes apply. The timeline is a PNG
because it is an artifact of the run.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ebbflow.data.records import Comparison, Evaluation, GateDecision

INK, FAINT, GRID = "#5b6471", "#9aa3af", "#e4e7ec"
SERIES = ("#2f6fdf", "#e0791a", "#159a7a", "#a24fc4", "#c8385a", "#7a8a1f", "#1795b8", "#8a6a4f")
VARIABLES = {INK: "var(--ink-2)", FAINT: "var(--ink-3)", GRID: "var(--line)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(SERIES, start=1)
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ebbflow",
    "text.parse_math": False,
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "savefig.transparent": True,
}
MAX_POINTS = 160
"""Points per curve; longer curves are averaged over equal spans of steps."""
MAX_LABELS = 9
MAX_STEPS = 12
"""Steps that a timeline shows: the last ones."""
TASKS = ("training", "rollout", "scoring", "validation", "receive", "profile")
"""Kinds of work that always have the same colour."""


class Panel(NamedTuple):
    """One of the small multiples: metrics that share an axis. ``band`` is the area between two metrics."""

    title: str
    lines: tuple[str, ...]
    band: tuple[str, str] | None = None


PANELS = (
    Panel("Reward, mean and range", ("reward/mean",), ("reward/min", "reward/max")),
    Panel("Ratio, mean |r − 1|", ("ratio/deviation",)),
    Panel("Clipped, down / up", ("clip/down", "clip/up")),
    Panel("Rollout mismatch, |Δ log-prob|", ("rollout/delta_mean",)),
    Panel("Reference divergence", ("kl/reference",)),
    Panel("Velocity drift", ("velocity_drift",)),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Loss", ("loss",)),
    Panel("Groups without variance", ("group/zero_std_share",)),
)


class Span(NamedTuple):
    """When a worker was busy with a task; ``start`` and ``end`` are seconds of any one clock."""

    role: str
    worker: int
    task: str
    start: float
    end: float


class Chart(NamedTuple):
    """A chart, with the title and the last value that the page puts above it."""

    title: str
    value: str
    svg: Markup


def label(metric: str) -> str:
    """A metric's name on the page: ``exact_match`` becomes "Exact match"."""
    words = metric.replace("_", " ")
    return words.upper() if words in ("ocr", "kl") else words[:1].upper() + words[1:]


def progress(evaluations: Sequence[Evaluation], metrics: Sequence[str], chosen: str, champion: Evaluation | None) -> Markup:
    """Held-out means over the run's evaluations. A band marks the ``chosen`` label; a dashed line is the champion."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(5.3, 3.0)
        positions, shown = range(len(evaluations)), [*evaluations, *([champion] if champion else [])]
        ends = []
        for metric, colour in zip(metrics, _colours(len(metrics)), strict=True):
            values = [evaluation.held_out.get(metric, math.nan) for evaluation in evaluations]
            width = 2.4 if metric == metrics[0] else 1.5
            axes.plot(positions, values, color=colour, marker="o", markersize=4, linewidth=width, clip_on=False)
            if math.isfinite(values[-1]):
                ends.append((values[-1], label(metric), colour))
        if champion is not None and metrics[0] in champion.held_out:
            axes.axhline(champion.held_out[metrics[0]], color=SERIES[0], linestyle=(0, (4, 3)), linewidth=1)
        axes.axvline([evaluation.label for evaluation in evaluations].index(chosen), color=GRID, linewidth=7, zorder=0)
        low, high = limits([value for evaluation in shown for name, value in evaluation.held_out.items() if name in metrics])
        axes.set(ylim=(low, high), xlim=(-0.15, len(evaluations) - 0.85))
        _label_evaluations(axes, [evaluation.label for evaluation in evaluations])
        axes.grid(axis="x", visible=False)
        _label_curves(axes, ends, len(evaluations) - 1, low, high)
        return _svg(figure, "Metrics over evaluations")


def differences(decision: GateDecision, metrics: Sequence[str]) -> Markup:
    """Every comparison of the gate as a point with its interval, against zero and the guardrails' tolerances.

    Colours match those of ``metrics`` in ``progress``; ``reward`` is not among them when it equals the first metric.
    """
    colours = dict(zip(metrics, _colours(len(metrics)), strict=True))
    comparisons: list[Comparison] = [decision.target, *decision.guardrails]
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(4.6, 0.75 + 0.42 * len(comparisons))
        axes.axvline(0, color=INK, linewidth=1)
        for row, comparison in enumerate(comparisons):
            colour = colours.get(comparison.metric, SERIES[0])
            axes.barh(row, -(comparison.tolerance or 0.0), height=0.8, color=GRID, linewidth=0)
            axes.plot([comparison.low, comparison.high], [row, row], color=colour, linewidth=3, alpha=0.45)
            axes.plot([comparison.difference], [row], color=colour, marker="o", markersize=6)
        axes.set_yticks(range(len(comparisons)), [label(comparison.metric) for comparison in comparisons])
        axes.set_ylim(len(comparisons) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.3g}" if abs(value) > 1e-9 else "0")
        return _svg(figure, "Differences between candidate and champion")


def training(metrics: Sequence[Mapping[str, float]]) -> list[Chart]:
    """The small multiples of one stage, without the panels whose metrics it did not report."""
    return [_panel(panel, metrics) for panel in PANELS if any(_series(metrics, key)[0] for key in panel.lines)]


def times(rows: Mapping[str, Mapping[str, float]]) -> Markup:
    """Seconds by phase, one stacked bar per row."""
    phases = list(dict.fromkeys(phase for row in rows.values() for phase in row))
    colours = dict(zip(phases, _colours(len(phases)), strict=True))
    longest = max(sum(row.values()) for row in rows.values()) or 1.0
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(10.2, 0.75 + 0.31 * len(rows))
        for position, row in enumerate(rows.values()):
            left = 0.0
            for phase, seconds in row.items():
                axes.barh(position, seconds, left=left, height=0.62, color=colours[phase], linewidth=0)
                left += seconds
            axes.text(left + longest * 0.008, position, f"{left:,.1f} s", va="center")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, longest * 1.09), xlabel="seconds")
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        handles = [matplotlib.patches.Patch(color=colours[phase], label=phase.replace("_", " ")) for phase in phases]
        figure.legend(handles=handles, loc="outside upper left", ncols=8, handlelength=0.9, handleheight=0.9, columnspacing=1.4)
        return _svg(figure, "Seconds per stage and phase")


def timeline(spans: Sequence[Span], steps: Mapping[int, tuple[float, float]]) -> bytes:
    """What each worker did when, as a PNG 1200 pixels wide: a row per worker, roles in the order of the spans.

    Args:
        spans: at least one.
        steps: (start, end) by step number. The last ``MAX_STEPS`` are shown; without steps, everything is.
    """
    shown = dict(sorted(steps.items())[-MAX_STEPS:])
    first, last = _time_range(spans, shown, whole=len(shown) == len(steps))
    zero = min(span.start for span in spans)
    rows = _rows(spans)
    tasks = sorted({span.task for span in spans}, key=lambda task: (TASKS.index(task) if task in TASKS else len(TASKS), task))
    colours = dict(zip(dict.fromkeys([*TASKS, *tasks]), _colours(len(TASKS) + len(tasks)), strict=False))
    with matplotlib.rc_context({**STYLE, "savefig.transparent": False, "axes.grid": False}):
        figure = Figure(figsize=(12, 1.1 + 0.34 * (max(rows.values()) + 1)), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for task in tasks:
            bars = [span for span in spans if span.task == task and span.end > first and span.start < last]
            axes.barh(
                [rows[span.role, span.worker] for span in bars],
                [span.end - span.start for span in bars],
                left=[span.start - zero for span in bars],
                height=0.76,
                label=task,
                color=colours[task],
                edgecolor="white",
                linewidth=0.3,
            )
        _mark_steps(axes, {number: (start - zero, end - zero) for number, (start, end) in shown.items()})
        axes.set_yticks(list(rows.values()), [f"{role} {worker}" for role, worker in rows])
        axes.set(ylim=(max(rows.values()) + 0.5, -0.5), xlim=(first - zero, last - zero), xlabel="seconds")
        axes.xaxis.set_major_locator(MaxNLocator(14))
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside upper left", ncols=8, handlelength=0.9, handleheight=0.9, columnspacing=1.4)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _rows(spans: Sequence[Span]) -> dict[tuple[str, int], float]:
    """The vertical position of each worker's row, from the top, with a gap between roles."""
    roles = list(dict.fromkeys(span.role for span in spans))
    workers = sorted({(roles.index(span.role), span.worker) for span in spans})
    return {(roles[role], worker): row + 0.4 * role for row, (role, worker) in enumerate(workers)}


def _time_range(spans: Sequence[Span], steps: Mapping[int, tuple[float, float]], whole: bool) -> tuple[float, float]:
    """Everything, or from the first of the steps to the end."""
    end = max([*(span.end for span in spans), *(end for _, end in steps.values())])
    return (min(span.start for span in spans) if whole else min(start for start, _ in steps.values())), end


def _mark_steps(axes: Axes, steps: Mapping[int, tuple[float, float]]) -> None:
    """A line at the start of each step and at the end of the last, with the step numbers above."""
    for number, (start, end) in steps.items():
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        middle = (start + end) / 2
        name = f"step {number}" if number == min(steps) else f"{number}"
        axes.text(middle, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom", clip_on=False)
    if steps:
        axes.axvline(max(end for _, end in steps.values()), color=INK, linewidth=0.8, linestyle=(0, (2, 2)))


def _panel(panel: Panel, metrics: Sequence[Mapping[str, float]]) -> Chart:
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(2.42, 1.45)
        if panel.band:
            low, high = (_series(metrics, key) for key in panel.band)
            if low[0] and low[0] == high[0]:
                axes.fill_between(low[0], low[1], high[1], color=SERIES[0], alpha=0.16, linewidth=0)
        last = []
        for key, colour in zip(panel.lines, SERIES, strict=False):
            steps, values = _series(metrics, key)
            if steps:
                axes.plot(steps, values, color=colour, marker="o" if len(steps) == 1 else None, markersize=3)
                last.append(_short(values[-1], 2 if len(panel.lines) > 1 else 3))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(lambda value, _: _short(value))
        axes.margins(x=0.02)
        return Chart(panel.title, " / ".join(last), _svg(figure, panel.title))


def _series(metrics: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of one metric, averaged over spans when there are more than ``MAX_POINTS``."""
    inputs = [(row["step"], row[key]) for row in metrics if key in row and math.isfinite(row[key])]
    span = -(-len(inputs) // MAX_POINTS) or 1
    groups = [inputs[start : start + span] for start in range(0, len(inputs), span)]
    return [sum(step for step, _ in group) / len(group) for group in groups], [
        sum(value for _, value in group) / len(group) for group in groups
    ]


def _short(value: float, digits: int = 3) -> str:
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if size < 1e-3 or size >= 1e5 else f"{value:.{digits}g}"


def _label_evaluations(axes: Axes, names: Sequence[str]) -> None:
    """Labels under the points; of many evaluations only every second, third ... so that none overlap."""
    stride = -(-len(names) // MAX_LABELS)
    shown = range(0, len(names), stride)
    axes.set_xticks(list(shown), [names[position].replace(" ", "\n", 1) for position in shown])


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Of an axis for scores: 0 to 1, or as far beyond as the values go."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([1.0, *finite])
    room = 0.05 * (high - low)
    return low - room * (low < 0), high + room * (high > 1)


def _label_curves(axes: Axes, ends: list[tuple[float, str, str]], x: int, low: float, high: float) -> None:
    """Name each curve at its end; names that would overlap are pushed apart. ``low`` to ``high`` is the axis."""
    gap, lowest = 0.075 * (high - low), low - (high - low)
    positions = []
    for value, _, _ in sorted(ends):
        lowest = max(value, lowest + gap)
        positions.append(lowest)
    overshoot = max(0.0, (positions[-1] if positions else low) - high)
    for (value, name, colour), position in zip(sorted(ends), positions, strict=True):
        text = f"{name} {value:.2f}"
        axes.annotate(
            text,
            (x, position - overshoot),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            annotation_clip=False,
        )


def _colours(count: int) -> list[str]:
    return [SERIES[index % len(SERIES)] for index in range(count)]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _svg(figure: Figure, description: str) -> Markup:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text)
