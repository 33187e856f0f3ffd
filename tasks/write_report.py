"""Write the report: what the run did, as HTML (also a Flyte Deck) and as summary.json."""

from __future__ import annotations

from typing import NamedTuple

from flytekit import Deck, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks.files import delete_checkpoints, fetch_artifact, make_node_output
from tasks.resources import light_resources
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy


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
    """Both files, in the run's folder and the MLflow run, which ends here unless it waits for
    approval.
    """
    import json

    from ebbflow.report import run_report
    from ebbflow.report.outcome import describe_outcome, read_example_prompt
    from ebbflow.report.run_facts import collect_run_facts
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.outage import deliver_saved_records
    from ebbflow.tracking.parent_run import log_results

    candidate = next(one for one in history if one.evaluation.label == decision.candidate)
    folders = {
        "policy": _locate_folder(candidate.policy.folder),
        "base": _locate_folder(base.folder),
    }
    page, numbers = (
        make_node_output(run, "report", name) for name in ("report.html", "summary.json")
    )
    with open_node_run(run, "report"):
        shown = history if champion.version is None else [*history, champion.evaluated]
        finished = {
            stage.record.label: stage
            for evaluated in history
            for stage in evaluated.policy.finished_stages
        }
        inputs = run_report.ReportInputs(
            recipe=recipe,
            tracked=run,
            evaluations=[
                (evaluated.evaluation, fetch_artifact(evaluated.samples)) for evaluated in shown
            ],
            stages=[
                (stage.record, json.loads(fetch_artifact(stage.metrics).read_text()))
                for stage in finished.values()
            ],
            decision=decision,
            registration=registration,
            base_seconds=base.seconds if base.finished_at > run.started_at else 0.0,
            outages=deliver_saved_records(run),
            facts=collect_run_facts(run),
            **folders,
        )
        run_report.write_report(page, inputs)
        run_report.write_summary(numbers, inputs)
    Deck("report", page.read_text())
    log_results(run, [page, numbers], finish=not inputs.awaits_approval)
    delete_checkpoints(run)
    example = read_example_prompt(fetch_artifact(candidate.samples))
    outcome = describe_outcome(recipe, run, decision, registration, **folders, example=example)
    print(f"\n{run_report.format_summary_table(inputs)}\n\n{outcome}", flush=True)
    return Report(
        FlyteFile(str(page), remote_path=f"{run.folder}/report.html"),
        FlyteFile(str(numbers), remote_path=f"{run.folder}/summary.json"),
    )


def _locate_folder(folder: FlyteDirectory) -> str:
    """Where a folder is for whoever is not in this pod: its URI, or on one machine its path."""
    return str(folder.remote_source or folder.path)
