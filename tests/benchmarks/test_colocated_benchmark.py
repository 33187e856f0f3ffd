"""The page of the benchmark of colocated processes."""

from __future__ import annotations

from benchmarks.colocated import IMAGES_PER_STEP, format_page


def test_the_page_has_the_median_of_the_ratios_of_the_turns() -> None:
    turns = [{1: 2.0, 2: 1.0}, {1: 3.0, 2: 2.0}, {1: 4.0, 2: 2.5}]
    page = format_page(turns, "a command")
    assert f"| 1 | {IMAGES_PER_STEP / 2:.1f} | {IMAGES_PER_STEP:.1f} | 2.00 |" in page
    assert "| median | | | 1.60 (wanted" in page
