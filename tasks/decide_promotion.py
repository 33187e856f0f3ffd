"""The gate: compares the candidate with the champion on the held-out prompts."""

from __future__ import annotations

from flytekit import task

from ebbflow.recipe import Recipe
from ebbflow.records import Verdict
from tasks.files import fetch
from tasks.resources import light
from tasks.types import ChampionPolicy, EvaluatedPolicy


@task(**light())
def decide_promotion(recipe: Recipe, candidate: EvaluatedPolicy, champion: ChampionPolicy) -> Verdict:
    """The decision with its reasons; changes nothing."""
    from ebbflow.data.tables import read_table
    from ebbflow.evaluation.gate import decide

    return decide(
        recipe,
        candidate.evaluation,
        champion.evaluated.evaluation,
        read_table(fetch(candidate.samples)),
        read_table(fetch(champion.evaluated.samples)),
    )
