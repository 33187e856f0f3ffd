"""Charts in which the same metric of two runs shares an axis, as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from ebbflow.plots.charts import (
    LINES,
    PANELS,
    Chart,
    format_metric_name,
    format_short,
    read_series,
    set_plain_scale,
)
from ebbflow.plots.svg import SERIES, STYLE, create_figure, render_svg

RunMetrics = Mapping[str, Sequence[Mapping[str, float]]]
"""The metrics of each step, with the key ``step``, by the name of the run."""


def plot_overlaid_panels(runs: RunMetrics) -> list[Chart]:
    """Plot the metrics of the report's panels, a chart each, with a line per run; without those
    that no run reported.
    """
    charts = []
    for panel in PANELS:
        for key in panel.lines:
            title = panel.title if len(panel.lines) == 1 else key
            chart = plot_overlaid_metric(runs, key, title)
            if chart.svg:
                charts.append(chart)
    return charts


def plot_overlaid_metric(runs: RunMetrics, key: str, title: str = "") -> Chart:
    """Plot one metric with a line per run, the second one dashed; the chart is empty where no run
    has it.

    Args:
        title: default: the name of the metric.
    """
    title = title or format_metric_name(key)
    with matplotlib.rc_context(STYLE):
        figure, axes = create_figure(2.9, 1.7)
        last_values = []
        for (name, metrics), colour, dashes in zip(runs.items(), SERIES, LINES, strict=False):
            steps, values = read_series(metrics, key)
            if steps:
                marker = "o" if len(steps) < 3 else None
                axes.plot(
                    steps, values, color=colour, linestyle=dashes, marker=marker, markersize=3
                )
                last_values.append((name, format_short(values[-1])))
        if not last_values:
            return Chart(title, "", Markup())
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        set_plain_scale(axes)
        axes.margins(x=0.02)
        described = ", ".join(f"{name} {value}" for name, value in last_values)
        return Chart(
            title,
            " / ".join(value for _, value in last_values),
            render_svg(figure, f"{title}, last values: {described}"),
        )
