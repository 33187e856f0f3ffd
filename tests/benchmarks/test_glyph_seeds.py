"""The table of the demo's seeds is what its numbers say, with the commit of the code."""

from __future__ import annotations

import json

from benchmarks.glyph_seeds import RESULTS, format_table
from benchmarks.machine import describe_commit


def test_the_table_of_seeds_is_made_of_its_numbers() -> None:
    stem = RESULTS / "glyph_seeds"
    results = json.loads(stem.with_suffix(".json").read_text())
    summaries = {int(seed): summary for seed, summary in results["runs"].items()}
    table = format_table("glyph", summaries, results["commit"])
    assert table == stem.with_suffix(".md").read_text()
    assert f"at commit {results['commit']};" in table


def test_the_commit_of_a_measurement_is_that_of_the_clone() -> None:
    assert describe_commit() != ""
