"""The report's charts as inline SVG, and a stage's timeline as PNG.

The timeline is a PNG because it is an artifact of the run, which people open outside the page.
"""

from __future__ import annotations

import io
import math
from collections import Counter
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
from ebbflow.formatting import format_number
from ebbflow.plots.svg import FAINT, INK, SERIES, STYLE, create_figure, render_svg

LINES: tuple[Any, ...] = ("solid", (0, (3, 1.5)))
"""Line styles of the metrics of a panel, so that colour is not all that tells them apart."""
MAX_POINTS = 160
"""Points per curve; longer curves are averaged over equal spans of steps."""
MAX_LABELS = 4
"""Evaluations that a panel names below its axis."""
MAX_STEPS = 12
"""Steps that a timeline shows: the last ones."""
TASKS = ("training", "rollout", "scoring", "validation", "receive", "profile")
"""Kinds of work that always have the same colour."""


class Panel(NamedTuple):
    """One of the small multiples: metrics that share an axis.

    Example::

        Panel(
            title="Reward, mean and range",
            meaning="...",
            lines=("reward/mean",),
            band=("reward/min", "reward/max"),
        )

    Attributes:
        meaning: what the reader should look for, in a sentence.
        lines: metrics that are drawn as lines; a stage that reports none of them has no panel.
        band: the lower and the upper metric of a shaded area.
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
    """When a worker was busy with a task; ``start`` and ``end`` are seconds of any one clock.

    Example::

        Span(role="rollout", worker=0, task="rollout", start=12.5, end=19.0)
    """

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
    """Write a metric's name as the page shows it: ``exact_match`` becomes "Exact match"."""
    words = metric.replace("_", " ")
    return words.upper() if words in ("ocr", "kl") else words[:1].upper() + words[1:]


def plot_progress(
    evaluations: Sequence[Evaluation],
    metrics: Sequence[str],
    chosen: str,
    champion: Evaluation | None,
) -> list[Chart]:
    """Plot held-out means over the run's evaluations, a panel per metric: each has a scale of its
    own.

    A ring marks the ``chosen`` label; a dashed line is the champion.
    """
    return [_plot_metric_progress(evaluations, metric, chosen, champion) for metric in metrics]


def _plot_metric_progress(
    evaluations: Sequence[Evaluation], metric: str, chosen: str, champion: Evaluation | None
) -> Chart:
    labels = [evaluation.label for evaluation in evaluations]
    name = format_metric_name(metric)
    values = [evaluation.held_out.get(metric, math.nan) for evaluation in evaluations]
    chosen_index = labels.index(chosen)
    with matplotlib.rc_context(STYLE):
        figure, axes = create_figure(2.9, 1.7)
        # One evaluation is a point without a line, so every point has a marker.
        axes.plot(range(len(values)), values, color=SERIES[0], marker="o", markersize=4)
        axes.plot(
            [chosen_index],
            [values[chosen_index]],
            color=SERIES[0],
            marker="o",
            markersize=10,
            fillstyle="none",
            markeredgewidth=1.2,
        )
        # The champion may lack a guardrail that was not installed where it was evaluated.
        champion_mean = champion.held_out.get(metric, math.nan) if champion else math.nan
        if math.isfinite(champion_mean):
            axes.axhline(champion_mean, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        axes.set_xlim(-0.3, len(values) - 0.7)
        _label_evaluations(axes, labels)
        set_plain_scale(axes)
        axes.grid(axis="x", visible=False)
        steps = ", ".join(
            f"{each} {format_number(value)}" for each, value in zip(labels, values, strict=True)
        )
        return Chart(
            name,
            format_number(values[chosen_index]),
            render_svg(figure, f"{name} over the evaluations: {steps}"),
        )


def plot_differences(decision: GateDecision) -> Markup:
    """Plot every comparison of the gate as a point with its interval, against zero and how far a
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
            # The shaded area is where a guardrail may lie without refusing the candidate.
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
            # A tick at zero may come out as 1e-17.
            axes.xaxis.set_major_formatter(
                lambda value, _: f"{value:+.3g}" if abs(value) > 1e-12 else "0"
            )
        return render_svg(
            figure, "Differences between candidate and champion; the table beside has the numbers"
        )


def plot_scatter(before: Sequence[float], after: Sequence[float], metric: str) -> Markup:
    """Plot a metric of every prompt before and after, against the diagonal; a larger mark stands
    for several prompts.

    Args:
        before, after: finite values, paired by prompt.
    """
    counts = Counter(zip(before, after, strict=True))
    # Marks differ in shape as well, for readers who do not tell red from green.
    kinds = {
        "rose": ([pair for pair in counts if pair[1] > pair[0]], "^", SERIES[2]),
        "fell": ([pair for pair in counts if pair[1] < pair[0]], "v", SERIES[4]),
        "the same": ([pair for pair in counts if pair[1] == pair[0]], "o", INK),
    }
    with matplotlib.rc_context(STYLE):
        figure, axes = create_figure(3.8, 3.6)
        low = min([*before, *after])
        high = max([*before, *after])
        axes.plot([low, high], [low, high], color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
        texts = []
        for name, (pairs, marker, colour) in kinds.items():
            texts.append(f"{sum(counts[pair] for pair in pairs)} {name}")
            if pairs:
                # Area in points^2; under linear growth one frequent pair would cover the others.
                sizes = [30 * min(counts[pair], 40) ** 0.6 for pair in pairs]
                axes.scatter(
                    [pair[0] for pair in pairs],
                    [pair[1] for pair in pairs],
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
        set_plain_scale(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(lambda value, _: format_short(value))
        figure.legend(
            loc="outside upper left", ncols=3, handletextpad=0.2, columnspacing=1.0, markerscale=0.8
        )
        return render_svg(
            figure,
            f"{format_metric_name(metric)} of every prompt before and after: of {len(before)}"
            f" prompts {', '.join(texts)}",
        )


def plot_training(metrics: Sequence[Mapping[str, float]]) -> list[Chart]:
    """Plot the small multiples of one stage, without panels whose metrics it did not report."""
    return [
        _plot_panel(panel, metrics)
        for panel in PANELS
        if any(read_series(metrics, key)[0] for key in panel.lines)
    ]


def plot_timeline(spans: Sequence[Span], steps: Mapping[int, tuple[float, float]]) -> bytes:
    """Plot what each worker did when, as a PNG 1200 pixels wide: a row per worker, roles in the
    order of the spans.

    Args:
        spans: at least one.
        steps: (start, end) by step number. The last ``MAX_STEPS`` are shown; without steps,
            everything is.
    """
    last_steps = dict(sorted(steps.items())[-MAX_STEPS:])
    first, last = _find_time_range(spans, last_steps, whole=len(last_steps) == len(steps))
    # The axis counts seconds from the stage's first span, also where only its end is shown.
    zero = min(span.start for span in spans)
    rows = _place_rows(spans)
    tasks = sorted(
        {span.task for span in spans},
        key=lambda task: (TASKS.index(task) if task in TASKS else len(TASKS), task),
    )
    # The known tasks come first, whether they occur or not, so that their colours never change.
    colours = {
        task: SERIES[index % len(SERIES)]
        for index, task in enumerate(dict.fromkeys([*TASKS, *tasks]))
    }
    with matplotlib.rc_context({**STYLE, "savefig.transparent": False, "axes.grid": False}):
        height = 1.1 + 0.34 * (max(rows.values()) + 1)
        figure = Figure(figsize=(12, height), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        visible = [span for span in spans if span.end > first and span.start < last]
        # One call per task, also for a task without a visible bar: the legend names all of them.
        for task in tasks:
            bars = [span for span in visible if span.task == task]
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
        _mark_steps(axes, last_steps, zero)
        axes.set_yticks(list(rows.values()), [f"{role} {worker}" for role, worker in rows])
        # The y axis points down: the first role is the top row.
        axes.set(ylim=(max(rows.values()) + 0.5, -0.5), xlim=(first - zero, last - zero))
        axes.set_xlabel("seconds")
        axes.xaxis.set_major_locator(MaxNLocator(14))
        axes.spines["left"].set_visible(False)
        figure.legend(
            loc="outside upper left", ncols=8, handlelength=0.9, handleheight=0.9, columnspacing=1.4
        )
        buffer = io.BytesIO()
        # Without matplotlib's version in it, equal spans give equal bytes.
        figure.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()


def _place_rows(spans: Sequence[Span]) -> dict[tuple[str, int], float]:
    """Compute the vertical position of each worker's row, from the top, with a gap between
    roles."""
    # In the order in which the roles first appear, which is that of the caller.
    roles = list(dict.fromkeys(span.role for span in spans))
    workers = sorted({(roles.index(span.role), span.worker) for span in spans})
    return {(roles[role], worker): row + 0.4 * role for row, (role, worker) in enumerate(workers)}


def _find_time_range(
    spans: Sequence[Span], steps: Mapping[int, tuple[float, float]], whole: bool
) -> tuple[float, float]:
    """Find what the timeline shows: everything, or from the first of the steps to the end."""
    end = max([*(span.end for span in spans), *(end for _, end in steps.values())])
    # Only the whole range includes the work before the first step, such as loading models.
    starts = [span.start for span in spans] if whole else [start for start, _ in steps.values()]
    return min(starts), end


def _mark_steps(axes: Axes, steps: Mapping[int, tuple[float, float]], zero: float) -> None:
    """Draw a line at the start of each step and at the end of the last, with the step numbers
    above."""
    for number, (start, end) in steps.items():
        axes.axvline(start - zero, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        middle = (start + end) / 2 - zero
        name = f"step {number}" if number == min(steps) else f"{number}"
        # x in seconds, y as a share of the axes' height: just above the rows.
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
            max(end for _, end in steps.values()) - zero,
            color=INK,
            linewidth=0.8,
            linestyle=(0, (2, 2)),
        )


def _plot_panel(panel: Panel, metrics: Sequence[Mapping[str, float]]) -> Chart:
    with matplotlib.rc_context(STYLE):
        figure, axes = create_figure(2.42, 1.45)
        if panel.band:
            low, high = (read_series(metrics, key) for key in panel.band)
            # A band needs both metrics at the same steps; a stage may report one of them alone.
            if low[0] and low[0] == high[0]:
                axes.fill_between(low[0], low[1], high[1], color=SERIES[0], alpha=0.16, linewidth=0)
        last_values = []
        for key, colour, dashes in zip(panel.lines, SERIES, LINES, strict=False):
            steps, values = read_series(metrics, key)
            if steps:
                # A line through one point is invisible.
                marker = "o" if len(steps) == 1 else None
                axes.plot(
                    steps, values, color=colour, linestyle=dashes, marker=marker, markersize=3
                )
                last_values.append(format_short(values[-1], 2 if len(panel.lines) > 1 else 3))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        set_plain_scale(axes)
        axes.margins(x=0.02)
        value = " / ".join(last_values)
        return Chart(
            panel.title, value, render_svg(figure, f"{panel.title} over the steps, last {value}")
        )


def read_series(
    metrics: Sequence[Mapping[str, float]], key: str
) -> tuple[list[float], list[float]]:
    """Read the steps and finite values of one metric, averaged over spans when there are more than
    ``MAX_POINTS``.
    """
    points = [(row["step"], row[key]) for row in metrics if key in row and math.isfinite(row[key])]
    span = -(-len(points) // MAX_POINTS) or 1  # rounded up; 1 also where there are no points
    groups = [points[start : start + span] for start in range(0, len(points), span)]
    steps = [sum(step for step, _ in group) / len(group) for group in groups]
    values = [sum(value for _, value in group) / len(group) for group in groups]
    return steps, values


def set_plain_scale(axes: Axes) -> None:
    """Put three or four plain numbers on the y axis, and leave room above and below."""
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(lambda value, _: format_short(value))
    axes.margins(y=0.12)


def format_short(value: float, digits: int = 3) -> str:
    """Write a number for an axis, or for the last value of a curve."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}"
    # "1.0e-4" instead of "1.0e-04": the labels of a small panel have little room.
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _label_evaluations(axes: Axes, names: Sequence[str]) -> None:
    """Put labels under the points; of many evaluations only every second, third ... so that none
    overlap.
    """
    stride = -(-len(names) // MAX_LABELS)
    positions = range(0, len(names), stride)
    # "1.2 online" takes two lines.
    texts = [names[position].replace(" ", "\n", 1) for position in positions]
    axes.set_xticks(list(positions), texts)
