"""The benchmark of specialists: differences are paired by prompt, and a specialist that taught
nothing is not compared.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import specialists
from benchmarks.glyph_seeds import set_seed
from ebbflow.recipe import Recipe

SCORES = {"base": [0.0, 0.5], "specialist": [0.5, 1.0], "merged": [0.25, 1.0]}


def run(**scores: list[float]) -> dict[str, Any]:
    return {"scores": {"digits": SCORES | scores}, "promoted": True, "wall_seconds": 1}


def test_differences_are_paired_by_prompt() -> None:
    page = specialists.format_table({"0": run()})
    assert "| digits | 0 | 0.250 ± 0.250 | 0.750 ± 0.250 | 0.625 ± 0.375 | −0.125 ± 0.125 |" in page
    assert (
        "The worst difference of any set and seed is −0.125; wanted is no less than −0.020." in page
    )


def test_seeds_have_a_mean_with_an_error_of_its_own() -> None:
    page = specialists.format_table({"0": run(), "1": run(merged=[0.75, 1.0])})
    assert (
        "| digits | mean | 0.250 ± 0.000 | 0.750 ± 0.000 | 0.750 ± 0.125 | +0.000 ± 0.125 |" in page
    )


def test_a_specialist_that_its_gate_refused_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(set_seed(specialists.RECIPE, 1))
    taught = {name: f"commit of {name}" for name in recipe.branches}
    monkeypatch.setattr(
        specialists, "read_policy_metadata", lambda folder: SimpleNamespace(teachers=taught)
    )
    monkeypatch.setattr(
        specialists,
        "verify_folder",
        lambda folder: f"commit of {folder.parts[-2].rpartition('-')[2]}",
    )
    found = specialists.list_policies(recipe, tmp_path)
    assert {name: path.parts[-2] for name, path in found.items()} == {
        "capitals": "1.1-online-capitals",
        "digits": "1.2-online-digits",
        "lower_case": "1.3-online-lower_case",
        "merged": "1.4-online",
    }
    taught["digits"] = "commit of base"
    with pytest.raises(SystemExit, match="the gate of branch digits refused its specialist"):
        specialists.list_policies(recipe, tmp_path)
