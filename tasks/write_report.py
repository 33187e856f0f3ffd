"""Write the report: what the run did, as HTML (also a Flyte Deck) and as summary.json."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks.files import delete_checkpoints, fetch, node_output
from tasks.resources import light
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy


class Report(NamedTuple):
    """The HTML page and summary.json."""

    report: FlyteFile
    summary: FlyteFile


@task(enable_deck=True, deck_fields=(), **light())
def write_report(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    history: list[EvaluatedPolicy],
    champion: ChampionPolicy,
    decision: GateDecision,
    registration: Registration,
) -> Report:
    """Both files, in the run's folder and the MLflow run, which ends here unless it waits for
    approval.
    """
    import json

    from ebbflow.tracking import report
    from ebbflow.tracking.child_run import node_run
    from ebbflow.tracking.outage import deliver_saved
    from ebbflow.tracking.outcome import describe_outcome, example_prompt
    from ebbflow.tracking.parent_run import log_results
    from ebbflow.tracking.run_facts import run_facts

    candidate = next(one for one in history if one.evaluation.label == decision.candidate)
    folders = {"policy": _location(candidate.policy.folder), "base": _location(base.folder)}
    page, numbers = (node_output(run, "report", name) for name in ("report.html", "summary.json"))
    with node_run(run, "report"):
        shown = history if champion.version is None else [*history, champion.evaluated]
        finished = {
            stage.record.label: stage
            for evaluated in history
            for stage in evaluated.policy.finished_stages
        }
        inputs = report.ReportInputs(
            recipe=recipe,
            tracked=run,
            evaluations=[(evaluated.evaluation, fetch(evaluated.samples)) for evaluated in shown],
            stages=[
                (stage.record, json.loads(fetch(stage.metrics).read_text()))
                for stage in finished.values()
            ],
            decision=decision,
            registration=registration,
            base_seconds=base.seconds if base.finished_at > run.started_at else 0.0,
            outages=deliver_saved(run),
            facts=run_facts(run),
            **folders,
        )
        report.write_report(page, inputs)
        report.write_summary(numbers, inputs)
    Deck("report", page.read_text())
    log_results(run, [page, numbers], finish=not inputs.awaits_approval)
    delete_checkpoints(run)
    example = example_prompt(fetch(candidate.samples))
    outcome = describe_outcome(recipe, run, decision, registration, **folders, example=example)
    print(f"\n{report.summary_table(inputs)}\n\n{outcome}", flush=True)
    return Report(
        FlyteFile(str(page), remote_path=f"{run.folder}/report.html"),
        FlyteFile(str(numbers), remote_path=f"{run.folder}/summary.json"),
    )


def _location(folder: FlyteDirectory) -> str:
    """Where a folder is for whoever is not in this pod: its URI, or on one machine its path."""
    return str(folder.remote_source or folder.path)
