"""How a chart becomes inline SVG: the colours and style of all charts, and the rendering.

Text stays text, and colours are CSS variables of ``style.html``, so that the page's light and dark
themes apply.
"""

from __future__ import annotations

import hashlib
import io
import re
from typing import Any

from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK = "#5b6471"
FAINT = "#9aa3af"
GRID = "#e4e7ec"
SERIES = ("#2f6fdf", "#e0791a", "#159a7a", "#a24fc4", "#c8385a", "#7a8a1f", "#1795b8", "#8a6a4f")
VARIABLES = {INK: "var(--ink-2)", FAINT: "var(--ink-3)", GRID: "var(--line)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(SERIES, start=1)
}
"""The CSS variable that takes the place of each colour in the SVG."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, which can be searched and takes the page's font
    "svg.hashsalt": "ebbflow",  # ids are the same in every run, so the page has the same bytes
    "text.parse_math": False,  # a label with a dollar sign is no formula
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
"""The rcParams under which charts are drawn."""


def create_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Create a figure with one plot, ``width`` by ``height`` inches.

    Not through pyplot, which keeps every figure in a global list and is not safe in threads.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def render_svg(figure: Figure, description: str) -> Markup:
    """Render a figure as an ``<svg>`` element for the middle of a page.

    Args:
        description: what a screen reader says of the chart.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    # What stands before <svg> is an XML declaration, which a page cannot have in its middle.
    text = _make_ids_unique(text[text.index("<svg") :], description)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
    # matplotlib knows no CSS: the charts are drawn in fixed colours, which become variables here.
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text)


def _make_ids_unique(svg: str, description: str) -> str:
    """Give the ids that something refers to a prefix of this chart, and remove all other ids.

    matplotlib numbers its ids from the same start in every figure; on a page with several charts, a
    clip path would be taken from another chart.
    """
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    prefix = f"c{hashlib.sha256(f'{description}{svg}'.encode()).hexdigest()[:8]}-"

    def rename_ids_of_tag(tag: re.Match[str]) -> str:
        definitions = re.sub(
            r' id="([^"]*)"',
            lambda name: f' id="{prefix}{name[1]}"' if name[1] in used else "",
            tag[0],
        )
        return re.sub(r'(href="#|url\(#)', rf"\1{prefix}", definitions)

    # Tags only: a prompt or a label between them may look like a reference.
    return re.sub(r"<[^>]+>", rename_ids_of_tag, svg)
