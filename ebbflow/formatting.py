"""How numbers are written for people: significant digits, since metrics live on scales from a
thousandth to thousands.
"""

from __future__ import annotations

import math


def format_number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant digits, in scientific notation only where it is tiny;
    a dash for None and NaN.

    Example::

        >>> [format_number(value) for value in (0.5, 12345.6, 0.00001234, None)]
        ['0.500', '12,346', '1.23e-5', '–']
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    # Half below the limit: 999.6 would round to 1.00e+03 instead of 1,000.
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-")
    # "#" keeps the zeros at the end (0.500), and with them a point after whole numbers (123.).
    return f"{value:#.{digits}g}".rstrip(".")


def first_doc_paragraph(doc: str | None) -> str:
    """Return the first paragraph of a docstring as one line; empty without a docstring."""
    return " ".join((doc or "").strip().split("\n\n")[0].split())


def format_difference(value: float, digits: int = 3) -> str:
    """Write a difference: ``format_number`` with its sign."""
    return f"+{format_number(value, digits)}" if value >= 0 else format_number(value, digits)


def format_duration(seconds: float) -> str:
    """Write seconds as hours, minutes and seconds, of which the two largest are written."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    if minutes:
        return f"{minutes} min {rest:02} s"
    return f"{seconds:.1f} s"
