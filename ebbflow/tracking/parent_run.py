"""The parent run of an execution, found by tags and resumed when it is tried again.

It is opened before any work, so a store that is down is an error here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow.exceptions import MlflowException

from ebbflow.data.records import Evaluation, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import cleaned
from ebbflow.tracking.delivery import flatten, log_params
from ebbflow.tracking.outage import settle
from ebbflow.tracking.store import (
    DIGEST,
    EXECUTION,
    ROLE,
    TrackingError,
    check_store,
    connect,
    create_run,
    find,
    last_steps,
    resolve_tracking_uri,
    sqlite_file,
)

log = logging.getLogger(__name__)


def start_run(recipe: Recipe, execution_id: str | None, tags: Mapping[str, str] | None = None) -> TrackedRun:
    """Open the parent run of an execution, or find it again when the execution is retried.

    Args:
        recipe: logged as parameters and as recipe.yaml.
        execution_id: what identifies the execution across retries; None (a run without an orchestrator) always opens a new run.
        tags: what ``stopped_run`` is to find it by.

    Raises:
        TrackingError: the store cannot be used, or the execution was already tracked with another recipe.
    """
    client, experiment_id = _store(recipe)
    known_by = {ROLE: "execution", EXECUTION: execution_id} if execution_id else {}
    run = find(client, experiment_id, known_by) if known_by else None
    if run is None:
        about = _parent_tags(recipe, execution_id) | dict(tags or {})
        run = create_run(client, experiment_id, known_by, about, recipe.name)
    elif run.data.tags.get(DIGEST) != recipe.digest:
        raise TrackingError(
            f"execution {execution_id} is run {run.info.run_id} of recipe {run.data.tags.get(DIGEST, 'unknown')[:12]} "
            f"and now comes with {recipe.digest[:12]}; a changed recipe needs a new execution"
        )
    tracked = _tracked(recipe, run)
    open_run(recipe, tracked)
    return tracked


def stopped_run(recipe: Recipe, tags: Mapping[str, str]) -> TrackedRun | None:
    """The newest run of the recipe with these tags, to go on with (``open_run``); None when there is none to go on with.

    That is so when it has FINISHED, and when its folder is not on this machine: deleting the folder is how one begins anew.
    """
    client, experiment_id = _store(recipe)
    run = find(client, experiment_id, {ROLE: "execution", DIGEST: recipe.digest, **tags}, order="DESC")
    if run is None or run.info.status == "FINISHED":
        return None
    tracked = _tracked(recipe, run)
    return tracked if Path(tracked.folder).is_dir() else None


def open_run(recipe: Recipe, tracked: TrackedRun) -> None:
    """Let the run be RUNNING, with its recipe as parameters and as recipe.yaml; doing it again changes nothing."""
    settle(tracked)
    client, settings = connect(tracked.tracking_uri), recipe.model_dump(mode="json")
    client.update_run(tracked.run_id, status="RUNNING")
    log_params(client, tracked.run_id, flatten(settings))
    client.log_text(tracked.run_id, yaml.safe_dump(settings, sort_keys=False), "recipe.yaml")


def finish_run(tracked: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Set the status of the parent run."""
    connect(tracked.tracking_uri).set_terminated(tracked.run_id, status)


def tell_results(tracked: TrackedRun, evaluations: Sequence[Evaluation], files: Sequence[Path], over: bool = True) -> None:
    """Put the run's headline on the parent (held-out means by policy version, the report), and close it when it is over.

    Best effort: what a run has learnt does not get lost because the store went away at its very end.
    """
    client, run_id = connect(tracked.tracking_uri), tracked.run_id
    now = int(time.time() * 1000)
    try:
        logged = last_steps(client, client.get_run(run_id))
        metrics = [
            Metric(f"held_out/{name}", value, now, evaluation.policy_version)
            for evaluation in evaluations
            for name, value in evaluation.held_out.items()
            if f"held_out/{name}" not in logged  # a retry would append them again
        ]
        client.log_batch(run_id, metrics=metrics)
        for file in files:
            client.log_artifact(run_id, str(file))
        if over:
            finish_run(tracked, "FINISHED")
    except Exception as error:
        log.warning("run %s could not be told its results in MLflow: %s", run_id, cleaned(str(error)))


def _store(recipe: Recipe) -> tuple[MlflowClient, str]:
    """A client of the recipe's store, and the id of the recipe's experiment there."""
    uri = resolve_tracking_uri(recipe)
    check_store(uri)
    client = connect(uri)
    return client, _experiment(client, recipe, uri)


def _experiment(client: MlflowClient, recipe: Recipe, uri: str) -> str:
    name = recipe.tracking.experiment
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = sqlite_file(uri)
        # MLflow would put artifacts into ./mlruns of wherever a task happens to run
        location = (database.absolute().parent / "mlartifacts").as_uri() if database else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another execution was faster
    if experiment is None or experiment.lifecycle_stage != "active":
        raise TrackingError(
            f"experiment {name!r} was deleted in {cleaned(uri)}; restore it with "
            "`mlflow experiments restore`, or set tracking.experiment to another name"
        )
    return experiment.experiment_id


def _parent_tags(recipe: Recipe, execution_id: str | None) -> dict[str, str]:
    stages = " → ".join(f"{stage.kind} {stage.algorithm.name}" for stage in recipe.stages)
    note = f"Recipe **{recipe.name}**, seed {recipe.seed}: {recipe.rounds} × ({stages}), {recipe.policy.train} training."
    execution = {EXECUTION: execution_id} if execution_id else {}
    return {ROLE: "execution", DIGEST: recipe.digest, "mlflow.note.content": note, **execution}


def _tracked(recipe: Recipe, run: Run) -> TrackedRun:
    return TrackedRun(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        tracking_uri=resolve_tracking_uri(recipe),
        folder=_folder(recipe.output, f"{recipe.name}-{run.info.run_id[:8]}"),
        recipe_digest=recipe.digest,
        started_at=run.info.start_time / 1000,
    )


def _folder(output: str, name: str) -> str:
    return f"{output.rstrip('/')}/{name}" if "://" in output else str(Path(output).absolute() / name)
