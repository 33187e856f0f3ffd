"""The report's charts as inline SVG, and a stage's timeline as PNG.

In the SVG, text stays text and colours are CSS variables, so the page's light and dark themes
apply. The timeline is a PNG because it is an artifact of the run.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ebbflow.data.records import Comparison, Evaluation, GateDecision
from ebbflow.formatting import format_number

INK = "#5b6471"
FAINT = "#9aa3af"
GRID = "#e4e7ec"
SERIES = ("#2f6fdf", "#e0791a", "#159a7a", "#a24fc4", "#c8385a", "#7a8a1f", "#1795b8", "#8a6a4f")
LINES: tuple[Any, ...] = ("solid", (0, (3, 1.5)))
"""Of the metrics of a panel, so that colour is not all that tells them apart."""
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
MAX_LABELS = 4
"""Evaluations that a panel names below its axis."""
MAX_STEPS = 12
"""Steps that a timeline shows: the last ones."""
TASKS = ("training", "rollout", "scoring", "validation", "receive", "profile")
"""Kinds of work that always have the same colour."""


class Panel(NamedTuple):
    """One of the small multiples: metrics that share an axis. ``band`` is the area between two
    metrics.
    """

    title: str
    meaning: str
    lines: tuple[str, ...]
    band: tuple[str, str] | None = None


PANELS = (
    Panel(
        "Reward, mean and range",
        "Of the step's samples: the line is their mean, the band reaches from the least to the"
        " greatest. It should rise.",
        ("reward/mean",),
        ("reward/min", "reward/max"),
    ),
    Panel(
        "Ratio, mean |r − 1|",
        "How far the probability of a sample has moved since it was generated; near 0 in the first"
        " update of a step.",
        ("ratio/deviation",),
    ),
    Panel(
        "Clipped, down / up",
        "Shares of the loss terms whose ratio left the clip range below (solid line) and above"
        " (dashed): they no longer train.",
        ("clip/down", "clip/up"),
    ),
    Panel(
        "Rollout mismatch, |Δ log-prob|",
        "Difference between the engine's and the trainer's log-probability of the same sample; it"
        " should stay near 0.",
        ("rollout/delta_mean",),
    ),
    Panel(
        "Reference divergence",
        "Divergence from the reference policy that the penalty acts on; a steep rise says that the"
        " policy runs away.",
        ("kl/reference",),
    ),
    Panel(
        "Velocity drift",
        "Mean squared difference between the policy's velocity and the base model's; a steep rise"
        " comes before hacked rewards.",
        ("velocity_drift",),
    ),
    Panel(
        "Gradient norm",
        "Length of the gradient before it is clipped; spikes say that training is unstable.",
        ("grad_norm",),
    ),
    Panel(
        "Loss",
        "What the optimiser minimises. In reinforcement learning its level says little: read the"
        " reward.",
        ("loss",),
    ),
    Panel(
        "Groups without variance",
        "Share of the prompts whose samples all have the same reward: nothing is learned from"
        " them.",
        ("group/zero_std_share",),
    ),
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


def format_metric_name(metric: str) -> str:
    """A metric's name on the page: ``exact_match`` becomes "Exact match"."""
    words = metric.replace("_", " ")
    return words.upper() if words in ("ocr", "kl") else words[:1].upper() + words[1:]


def plot_progress(
    evaluations: Sequence[Evaluation],
    metrics: Sequence[str],
    chosen: str,
    champion: Evaluation | None,
) -> list[Chart]:
    """Held-out means over the run's evaluations, a panel per metric: each has a scale of its own.

    A ring marks the ``chosen`` label; a dashed line is the champion.
    """
    return [_plot_metric_progress(evaluations, metric, chosen, champion) for metric in metrics]


def _plot_metric_progress(
    evaluations: Sequence[Evaluation], metric: str, chosen: str, champion: Evaluation | None
) -> Chart:
    labels = [evaluation.label for evaluation in evaluations]
    name = format_metric_name(metric)
    values = [evaluation.held_out.get(metric, math.nan) for evaluation in evaluations]
    at = labels.index(chosen)
    with matplotlib.rc_context(STYLE):
        figure, axes = _create_figure(2.9, 1.7)
        axes.plot(range(len(values)), values, color=SERIES[0], marker="o", markersize=4)
        axes.plot(
            [at],
            [values[at]],
            color=SERIES[0],
            marker="o",
            markersize=10,
            fillstyle="none",
            markeredgewidth=1.2,
        )
        if champion is not None and math.isfinite(its := champion.held_out.get(metric, math.nan)):
            axes.axhline(its, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        axes.set_xlim(-0.3, len(values) - 0.7)
        _label_evaluations(axes, labels)
        _set_plain_scale(axes)
        axes.grid(axis="x", visible=False)
        steps = ", ".join(
            f"{each} {format_number(value)}" for each, value in zip(labels, values, strict=True)
        )
        return Chart(
            name,
            format_number(values[at]),
            _render_svg(figure, f"{name} over the evaluations: {steps}"),
        )


def plot_differences(decision: GateDecision) -> Markup:
    """Every comparison of the gate as a point with its interval, against zero and how far a
    guardrail may fall.

    A row per metric, each on its own scale.
    """
    comparisons: list[Comparison] = [decision.target, *decision.guardrails]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 0.2 + 0.62 * len(comparisons)), layout="constrained")
        FigureCanvasSVG(figure)
        for axes, comparison in zip(
            figure.subplots(len(comparisons), 1, squeeze=False)[:, 0], comparisons, strict=True
        ):
            if comparison.tolerance:
                axes.axvspan(-comparison.tolerance, 0, color=FAINT, alpha=0.35, linewidth=0)
            axes.axvline(0, color=INK, linewidth=1)
            axes.plot(
                [comparison.low, comparison.high], [0, 0], color=SERIES[0], linewidth=3, alpha=0.45
            )
            axes.plot([comparison.difference], [0], color=SERIES[0], marker="o", markersize=6)
            axes.set_yticks([0], [format_metric_name(comparison.metric)])
            axes.set_ylim(-1, 1)
            axes.grid(axis="y", visible=False)
            axes.spines["left"].set_visible(False)
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{value:+.3g}" if abs(value) > 1e-12 else "0"
            )
        return _render_svg(
            figure, "Differences between candidate and champion; the table beside has the numbers"
        )


def plot_scatter(before: Sequence[float], after: Sequence[float], metric: str) -> Markup:
    """A metric of every prompt before and after, against the diagonal; a larger mark stands for
    several prompts.

    Args:
        before, after: finite values, paired by prompt.
    """
    counts = Counter(zip(before, after, strict=True))
    kinds = {
        "rose": ([pair for pair in counts if pair[1] > pair[0]], "^", SERIES[2]),
        "fell": ([pair for pair in counts if pair[1] < pair[0]], "v", SERIES[4]),
        "the same": ([pair for pair in counts if pair[1] == pair[0]], "o", INK),
    }
    with matplotlib.rc_context(STYLE):
        figure, axes = _create_figure(3.8, 3.6)
        low = min([*before, *after])
        high = max([*before, *after])
        axes.plot([low, high], [low, high], color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
        texts = []
        for name, (pairs, marker, colour) in kinds.items():
            texts.append(f"{sum(counts[pair] for pair in pairs)} {name}")
            if pairs:
                sizes = [30 * min(counts[pair], 40) ** 0.6 for pair in pairs]
                at = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                axes.scatter(
                    *at,
                    s=sizes,
                    marker=marker,
                    color=colour,
                    alpha=0.6,
                    linewidth=0,
                    label=texts[-1],
                )
        axes.set(
            xlabel=f"{format_metric_name(metric)}, before",
            ylabel=f"{format_metric_name(metric)}, after",
        )
        _set_plain_scale(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(lambda value, _: _format_short(value))
        figure.legend(
            loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=1.0, markerscale=0.8
        )
        return _render_svg(
            figure,
            f"{format_metric_name(metric)} of every prompt before and after: of {len(before)}"
            f" prompts {', '.join(texts)}",
        )


def plot_training(metrics: Sequence[Mapping[str, float]]) -> list[Chart]:
    """The small multiples of one stage, without the panels whose metrics it did not report."""
    return [
        _plot_panel(panel, metrics)
        for panel in PANELS
        if any(_read_series(metrics, key)[0] for key in panel.lines)
    ]


def plot_timeline(spans: Sequence[Span], steps: Mapping[int, tuple[float, float]]) -> bytes:
    """What each worker did when, as a PNG 1200 pixels wide: a row per worker, roles in the order of
    the spans.

    Args:
        spans: at least one.
        steps: (start, end) by step number. The last ``MAX_STEPS`` are shown; without steps,
            everything is.
    """
    shown = dict(sorted(steps.items())[-MAX_STEPS:])
    first, last = _find_time_range(spans, shown, whole=len(shown) == len(steps))
    zero = min(span.start for span in spans)
    rows = _place_rows(spans)
    tasks = sorted(
        {span.task for span in spans},
        key=lambda task: (TASKS.index(task) if task in TASKS else len(TASKS), task),
    )
    colours = dict(
        zip(dict.fromkeys([*TASKS, *tasks]), _list_colours(len(TASKS) + len(tasks)), strict=False)
    )
    with matplotlib.rc_context({**STYLE, "savefig.transparent": False, "axes.grid": False}):
        figure = Figure(
            figsize=(12, 1.1 + 0.34 * (max(rows.values()) + 1)), dpi=100, layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for task in tasks:
            bars = [
                span
                for span in spans
                if span.task == task and span.end > first and span.start < last
            ]
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
        _mark_steps(
            axes, {number: (start - zero, end - zero) for number, (start, end) in shown.items()}
        )
        axes.set_yticks(list(rows.values()), [f"{role} {worker}" for role, worker in rows])
        axes.set(
            ylim=(max(rows.values()) + 0.5, -0.5),
            xlim=(first - zero, last - zero),
            xlabel="seconds",
        )
        axes.xaxis.set_major_locator(MaxNLocator(14))
        axes.spines["left"].set_visible(False)
        figure.legend(
            loc="outside upper left", ncols=8, handlelength=0.9, handleheight=0.9, columnspacing=1.4
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _place_rows(spans: Sequence[Span]) -> dict[tuple[str, int], float]:
    """The vertical position of each worker's row, from the top, with a gap between roles."""
    roles = list(dict.fromkeys(span.role for span in spans))
    workers = sorted({(roles.index(span.role), span.worker) for span in spans})
    return {(roles[role], worker): row + 0.4 * role for row, (role, worker) in enumerate(workers)}


def _find_time_range(
    spans: Sequence[Span], steps: Mapping[int, tuple[float, float]], whole: bool
) -> tuple[float, float]:
    """Everything, or from the first of the steps to the end."""
    end = max([*(span.end for span in spans), *(end for _, end in steps.values())])
    return (
        min(span.start for span in spans) if whole else min(start for start, _ in steps.values())
    ), end


def _mark_steps(axes: Axes, steps: Mapping[int, tuple[float, float]]) -> None:
    """A line at the start of each step and at the end of the last, with the step numbers above."""
    for number, (start, end) in steps.items():
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        middle = (start + end) / 2
        name = f"step {number}" if number == min(steps) else f"{number}"
        axes.text(
            middle,
            1.01,
            name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            clip_on=False,
        )
    if steps:
        axes.axvline(
            max(end for _, end in steps.values()), color=INK, linewidth=0.8, linestyle=(0, (2, 2))
        )


def _plot_panel(panel: Panel, metrics: Sequence[Mapping[str, float]]) -> Chart:
    with matplotlib.rc_context(STYLE):
        figure, axes = _create_figure(2.42, 1.45)
        if panel.band:
            low, high = (_read_series(metrics, key) for key in panel.band)
            if low[0] and low[0] == high[0]:
                axes.fill_between(low[0], low[1], high[1], color=SERIES[0], alpha=0.16, linewidth=0)
        last = []
        for key, colour, dashes in zip(panel.lines, SERIES, LINES, strict=False):
            steps, values = _read_series(metrics, key)
            if steps:
                marker = "o" if len(steps) == 1 else None
                axes.plot(
                    steps, values, color=colour, linestyle=dashes, marker=marker, markersize=3
                )
                last.append(_format_short(values[-1], 2 if len(panel.lines) > 1 else 3))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        _set_plain_scale(axes)
        axes.margins(x=0.02)
        return Chart(
            panel.title,
            " / ".join(last),
            _render_svg(figure, f"{panel.title} over the steps, last {' / '.join(last)}"),
        )


def _read_series(
    metrics: Sequence[Mapping[str, float]], key: str
) -> tuple[list[float], list[float]]:
    """Steps and finite values of one metric, averaged over spans when there are more than
    ``MAX_POINTS``.
    """
    inputs = [(row["step"], row[key]) for row in metrics if key in row and math.isfinite(row[key])]
    span = -(-len(inputs) // MAX_POINTS) or 1
    groups = [inputs[start : start + span] for start in range(0, len(inputs), span)]
    return [sum(step for step, _ in group) / len(group) for group in groups], [
        sum(value for _, value in group) / len(group) for group in groups
    ]


def _set_plain_scale(axes: Axes) -> None:
    """Three or four plain numbers on the y axis, and room above and below."""
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(lambda value, _: _format_short(value))
    axes.margins(y=0.12)


def _format_short(value: float, digits: int = 3) -> str:
    if value == 0:
        return "0"
    size = abs(value)
    return (
        f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
        if size < 1e-3 or size >= 1e5
        else f"{value:.{digits}g}"
    )


def _label_evaluations(axes: Axes, names: Sequence[str]) -> None:
    """Labels under the points; of many evaluations only every second, third ... so that none
    overlap.
    """
    stride = -(-len(names) // MAX_LABELS)
    shown = range(0, len(names), stride)
    axes.set_xticks(list(shown), [names[position].replace(" ", "\n", 1) for position in shown])


def _list_colours(count: int) -> list[str]:
    return [SERIES[index % len(SERIES)] for index in range(count)]


def _create_figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _render_svg(figure: Figure, description: str) -> Markup:
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = _make_ids_unique(text[text.index("<svg") :], description)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text)


def _make_ids_unique(svg: str, description: str) -> str:
    """The ids that something refers to, unlike those of other charts of the page; all others are
    left out.
    """
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    prefix = f"c{hashlib.sha256(f'{description}{svg}'.encode()).hexdigest()[:8]}-"

    def rename_ids_of_tag(tag: re.Match[str]) -> str:
        named = re.sub(
            r' id="([^"]*)"',
            lambda name: f' id="{prefix}{name[1]}"' if name[1] in used else "",
            tag[0],
        )
        return re.sub(r'(href="#|url\(#)', rf"\1{prefix}", named)

    return re.sub(r"<[^>]+>", rename_ids_of_tag, svg)
