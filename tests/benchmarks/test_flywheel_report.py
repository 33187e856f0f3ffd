"""The page of the benchmark of the flywheel."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.flywheel_report import format_page

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "flywheel.json"


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    page = "\n".join(format_page(json.loads(RESULTS.read_text()))) + "\n"
    assert page == RESULTS.with_suffix(".md").read_text()


def test_a_lower_score_without_the_circle_has_a_minus() -> None:
    results = json.loads(RESULTS.read_text())
    run = results["runs"][0]
    run["arms"]["flywheel"][-1]["true"] = 0.75
    run["arms"]["first_model"][-1]["true"] = 0.5
    results["runs"] = [run]
    page = "\n".join(format_page(results))
    assert "differs from the circle's by -0.250 to -0.250" in page
