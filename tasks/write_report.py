"""Write the report: what the run did, as HTML (also a Flyte Deck) and as summary.json."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import (
    Evaluation,
    GateDecision,
    Registration,
    StageRecord,
    TrackedRun,
)
from ebbflow.recipe import Recipe
from tasks.costs import find_machines, read_prices
from tasks.files import delete_checkpoints, fetch_artifact, make_node_output
from tasks.resources import DEPLOYMENT, light_resources
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy

if TYPE_CHECKING:  # their rooms import matplotlib
    from ebbflow.report.costs import Ledger
    from ebbflow.report.run_facts import RunFacts


class Report(NamedTuple):
    """The HTML page and summary.json."""

    report: FlyteFile
    summary: FlyteFile


@task(enable_deck=True, deck_fields=(), **light_resources())
def write_report(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    history: list[EvaluatedPolicy],
    champion: ChampionPolicy,
    decision: GateDecision,
    registration: Registration,
) -> Report:
    """Write both files, to the run's folder and the MLflow run, which ends here unless it waits for
    approval.
    """
    from ebbflow.report import run_report
    from ebbflow.report.outcome import describe_outcome, read_example_prompt
    from ebbflow.report.run_facts import collect_run_facts
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.outage import deliver_saved_records
    from ebbflow.tracking.parent_run import log_results

    candidate = next(
        evaluated for evaluated in history if evaluated.evaluation.label == decision.candidate
    )
    folders = {
        "policy": _locate_folder(candidate.policy.folder),
        "base": _locate_folder(base.folder),
    }
    page = make_node_output(run, "report", "report.html")
    numbers = make_node_output(run, "report", "summary.json")
    with open_node_run(run, "report"):
        facts = collect_run_facts(run)
        stages = _fetch_stages(history)
        inputs = run_report.ReportInputs(
            recipe=recipe,
            tracked=run,
            evaluations=_fetch_evaluations(history, champion),
            stages=stages,
            decision=decision,
            registration=registration,
            # A base model from the cache cost this run nothing.
            base_seconds=base.seconds if base.finished_at > run.started_at else 0.0,
            # What an outage of MLflow has kept back is delivered now.
            outages=deliver_saved_records(run),
            facts=facts,
            ledger=_build_ledger(recipe, facts, stages, _measure_gain(history, candidate)),
            **folders,
        )
        run_report.write_report(page, inputs)
        run_report.write_summary(numbers, inputs)
    # A Deck is HTML as it is: the page has escaped the prompts.
    Deck("report", page.read_text())
    costs = inputs.ledger.list_metrics() if inputs.ledger else {}
    log_results(run, [page, numbers], finish=not inputs.awaits_approval, metrics=costs)
    delete_checkpoints(run)
    example = read_example_prompt(fetch_artifact(candidate.samples))
    outcome = describe_outcome(recipe, run, decision, registration, **folders, example=example)
    print(f"\n{run_report.format_summary_table(inputs)}\n\n{outcome}", flush=True)
    return Report(
        FlyteFile(str(page), remote_path=f"{run.folder}/report.html"),
        FlyteFile(str(numbers), remote_path=f"{run.folder}/summary.json"),
    )


def _build_ledger(
    recipe: Recipe,
    facts: RunFacts,
    stages: list[tuple[StageRecord, list[dict[str, float]]]],
    gain: float | None,
) -> Ledger:
    """Build the ledger of a run's costs, with the machines and prices of this deployment."""
    from ebbflow.report.costs import build_ledger

    labels = [record.label for record, _ in stages]
    machines = partial(find_machines, DEPLOYMENT, recipe)
    return build_ledger(facts.nodes, labels, machines, read_prices(DEPLOYMENT), gain)


def _measure_gain(history: list[EvaluatedPolicy], candidate: EvaluatedPolicy) -> float | None:
    """Measure how far the held-out reward rose; None where it is unknown."""
    rewards = [evaluated.evaluation.held_out.get("reward") for evaluated in (history[0], candidate)]
    if rewards[0] is None or rewards[1] is None:
        return None
    return rewards[1] - rewards[0]


def _fetch_evaluations(
    history: list[EvaluatedPolicy], champion: ChampionPolicy
) -> list[tuple[Evaluation, Path]]:
    # Without a registered champion the candidate was compared with the first of the history.
    evaluations = list(history)
    if champion.version is not None:
        evaluations.append(champion.evaluated)
    return [(evaluated.evaluation, fetch_artifact(evaluated.samples)) for evaluated in evaluations]


def _fetch_stages(
    history: list[EvaluatedPolicy],
) -> list[tuple[StageRecord, list[dict[str, float]]]]:
    # By label: two stages that learn from one branch both list its stages.
    finished = {
        stage.record.label: stage
        for evaluated in history
        for stage in evaluated.policy.finished_stages
    }
    return [
        (stage.record, json.loads(fetch_artifact(stage.metrics).read_text()))
        for stage in finished.values()
    ]


def _locate_folder(folder: FlyteDirectory) -> str:
    """Locate a folder for whoever is not in this pod: its URI, or on one machine its path."""
    return str(folder.remote_source or folder.path)
