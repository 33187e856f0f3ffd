"""How numbers are written for people: significant digits, since metrics live on scales from a
thousandth to thousands.
"""

from __future__ import annotations

import math


def format_number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, in scientific notation only where it is tiny; a
    dash for None and NaN.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    return f"{value:#.{digits}g}".rstrip(".")


def first_doc_paragraph(doc: str | None) -> str:
    """Return the first paragraph of a docstring as one line; empty without a docstring."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def format_difference(value: float, digits: int = 3) -> str:
    """A difference: ``format_number`` with its sign."""
    return f"+{format_number(value, digits)}" if value >= 0 else format_number(value, digits)


def format_duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds, of which the two largest are written."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min"
        if hours
        else f"{minutes} min {rest:02} s"
        if minutes
        else f"{seconds:.1f} s"
    )
