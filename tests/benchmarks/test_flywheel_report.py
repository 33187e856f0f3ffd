"""The page of the benchmark of the flywheel."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.flywheel_report import format_page, write_report

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


def test_results_whose_first_reward_models_were_all_refused_have_a_page_without_scores(
    tmp_path: Path,
) -> None:
    results = json.loads(RESULTS.read_text())
    for run in results["runs"]:
        run["arms"] = {}
        run["reward_models"] = run["reward_models"][:1]
        run["reward_models"][0]["decision"]["promote"] = False
    path = tmp_path / "flywheel.json"
    path.write_text(json.dumps(results))
    path.with_suffix(".png").write_bytes(b"the picture of earlier results")
    write_report(path)
    page = path.with_suffix(".md").read_text()
    assert "In seed 0, 1, 2 the gate refused the first reward model" in page
    assert "True score over" not in page
    assert page.count("| no |") == len(results["runs"])
    assert not path.with_suffix(".png").exists()
