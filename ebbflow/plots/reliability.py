"""The reliability diagram of a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from markupsafe import Markup

from ebbflow.plots.svg import FAINT, INK, SERIES, STYLE, create_figure, render_svg

LARGEST_MARK = 160
"""Area of the mark of the bin with the most answers, in square points."""


def plot_reliability(bins: Sequence[tuple[float, float, int]]) -> Markup:
    """Plot how often predictions were right against the confidence that they had.

    Args:
        bins: (mean confidence, share of right predictions, number of answers).
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = create_figure(4.2, 3.4)
        # Where a calibrated model lies.
        axes.plot([0.5, 1], [0.5, 1], color=FAINT, linewidth=1, linestyle="--")
        confidences = [confidence for confidence, _, _ in bins]
        shares = [right for _, right, _ in bins]
        # A bin of three answers should not look like one of a hundred.
        largest = max(count for _, _, count in bins)
        axes.plot(confidences, shares, color=SERIES[0])
        axes.scatter(
            confidences,
            shares,
            s=[LARGEST_MARK * count / largest for _, _, count in bins],
            color=SERIES[0],
            alpha=0.6,
        )
        axes.set_xlim(0.48, 1.02)
        axes.set_ylim(min(0.4, min(shares) - 0.05), 1.05)
        axes.set_xlabel("confidence of the prediction", color=INK)
        axes.set_ylabel("share of right predictions", color=INK)
        return render_svg(figure, "Reliability of the predictions; the table has the numbers")
