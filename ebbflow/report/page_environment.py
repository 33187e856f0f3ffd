"""The environment of the templates of pages with results."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import jinja2

from ebbflow.evaluation.gate import REFUSED
from ebbflow.formatting import format_difference, format_duration, format_number
from ebbflow.plots import charts
from ebbflow.plots.pages import create_page_environment


def create_result_environment(*folders: Path) -> jinja2.Environment:
    """Create the environment of the templates of this room, which templates in further folders may
    import.
    """
    environment = create_page_environment(*folders, Path(__file__).parent)
    # A page marks the reasons that begin with it.
    environment.globals["refused"] = REFUSED
    environment.filters |= {
        "number": format_number,
        "signed": format_difference,
        "label": charts.format_metric_name,
        "duration": format_duration,
        "day": _format_day,
    }
    return environment


def _format_day(seconds: float) -> str:
    """Seconds since 1970 as a date and a time, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%d %B %Y, %H:%M} UTC".lstrip("0")
