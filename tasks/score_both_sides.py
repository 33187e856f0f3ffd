"""Score the stored pictures of the candidate and of the champion together, for the gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import Evaluation, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import scorer_resources
from tasks.types import ChampionPolicy, EvaluatedPolicy

if TYPE_CHECKING:
    from ebbflow.tracking.child_run import RunLogger


class GateSides(NamedTuple):
    """Both sides with the scores that the gate decides from."""

    candidate: EvaluatedPolicy
    champion: ChampionPolicy


def score_sides(
    recipe: Recipe,
    prompts: FlyteFile,
    sides: Mapping[str, EvaluatedPolicy],
    targets: Mapping[str, Path],
    run_logger: RunLogger,
) -> dict[str, Evaluation]:
    """Score the tables of all sides together, as ``score_tables_together``, and log how far their
    scores have drifted since they were evaluated.
    """
    from ebbflow.evaluation.gate_scores import describe_drift, score_tables_together

    evaluations = score_tables_together(
        recipe,
        fetch_artifact(prompts),
        {side: evaluated.evaluation for side, evaluated in sides.items()},
        {side: fetch_artifact(evaluated.samples) for side, evaluated in sides.items()},
        targets,
    )
    for side, evaluated in sides.items():
        drift = describe_drift(side, evaluated.evaluation, evaluations[side])
        run_logger.log_metrics(drift, step=0)
    return evaluations


@task(cache=ONCE_PER_RUN, **scorer_resources())
def score_both_sides(
    recipe: Recipe,
    run: TrackedRun,
    prompts: FlyteFile,
    candidate: EvaluatedPolicy,
    champion: ChampionPolicy,
) -> GateSides:
    """Check that both tables of samples are what their evaluations say, and score their held-out
    pictures in one pass.
    """
    from ebbflow.compute import require_requested_gpus, use_deterministic_kernels
    from ebbflow.tracking.child_run import open_node_run

    if recipe.deterministic:
        use_deterministic_kernels()
    require_requested_gpus()
    node = "gate scores"
    sides = {"candidate": candidate, "champion": champion.evaluated}
    if champion.anchor:
        sides["anchor"] = champion.anchor.evaluated
    paths = {side: make_node_output(run, node, f"{side}.parquet") for side in sides}
    with open_node_run(run, node) as run_logger:
        evaluations = score_sides(recipe, prompts, sides, paths, run_logger)
    scored = {
        side: EvaluatedPolicy(
            policy=sides[side].policy,
            evaluation=evaluations[side],
            samples=FlyteFile(str(paths[side])),
        )
        for side in sides
    }
    updated: dict[str, object] = {"evaluated": scored["champion"]}
    if champion.anchor:
        anchor = champion.anchor.model_copy(update={"evaluated": scored["anchor"]})
        updated["anchor"] = anchor
    return GateSides(candidate=scored["candidate"], champion=champion.model_copy(update=updated))
