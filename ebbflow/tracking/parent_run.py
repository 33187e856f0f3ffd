"""The parent run of an execution: found by its tags, and resumed when the execution is retried.

It is opened before any work starts, so here a store that is down is an error.
"""

from __future__ import annotations

import logging
import platform
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
from ebbflow.recipe.secrets import redact
from ebbflow.tracking.delivery import flatten, log_params
from ebbflow.tracking.outage import deliver_saved
from ebbflow.tracking.store import (
    ARTIFACTS,
    DIGEST,
    EXECUTION,
    MACHINE,
    PARENT,
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

logger = logging.getLogger(__name__)


def start_run(recipe: Recipe, execution_id: str | None, tags: Mapping[str, str] | None = None) -> TrackedRun:
    """Open the parent run of an execution, or find it again when the execution is retried.

    Args:
        recipe: logged as parameters and as recipe.yaml.
        execution_id: identifies the execution across retries; None (no orchestrator) always opens a new run.
        tags: what ``stopped_run`` finds it by.

    Raises:
        TrackingError: the store cannot be used, or the execution has a run of another recipe.
    """
    client, experiment_id = _store(recipe)
    identity = {ROLE: "execution", EXECUTION: execution_id} if execution_id else {}
    run = find(client, experiment_id, identity) if identity else None
    if run is None:
        all_tags = _parent_tags(recipe, execution_id) | dict(tags or {})
        run = create_run(client, experiment_id, identity, all_tags, recipe.name)
    elif run.data.tags.get(DIGEST) != recipe.digest:
        raise TrackingError(
            f"execution {execution_id} is run {run.info.run_id} of recipe {run.data.tags.get(DIGEST, 'unknown')[:12]}, not of "
            f"{recipe.digest[:12]}; a changed recipe needs a new execution"
        )
    tracked = _tracked(recipe, run)
    open_run(recipe, tracked)
    logger.info("MLflow run %s of recipe %s in %s", tracked.run_id, recipe.name, redact(tracked.tracking_uri))
    return tracked


def stopped_run(recipe: Recipe, tags: Mapping[str, str]) -> TrackedRun | None:
    """The newest run of the recipe with these tags, to be resumed with ``open_run``.

    None if it FINISHED, or if its folder is not on this machine: deleting the folder is how a user starts over. A run that this
    machine was stopped in before it made the folder has no node yet.
    """
    client, experiment_id = _store(recipe)
    run = find(client, experiment_id, {ROLE: "execution", DIGEST: recipe.digest, **tags}, order="DESC")
    if run is None or run.info.status == "FINISHED":
        return None
    tracked = _tracked(recipe, run)
    made_here = run.data.tags.get(MACHINE) == platform.node()
    resumed = Path(tracked.folder).is_dir() or (made_here and find(client, experiment_id, {PARENT: tracked.run_id}) is None)
    return tracked if resumed else None


def open_run(recipe: Recipe, tracked: TrackedRun) -> None:
    """Set the run RUNNING and log its recipe as parameters and as recipe.yaml. Idempotent."""
    deliver_saved(tracked)
    client, settings = connect(tracked.tracking_uri), recipe.model_dump(mode="json")
    client.update_run(tracked.run_id, status="RUNNING")
    log_params(client, tracked.run_id, flatten(settings))
    client.log_text(tracked.run_id, yaml.safe_dump(settings, sort_keys=False), "recipe.yaml")


def finish_run(tracked: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Set the status of the parent run."""
    connect(tracked.tracking_uri).set_terminated(tracked.run_id, status)


def log_results(tracked: TrackedRun, evaluations: Sequence[Evaluation], files: Sequence[Path], finish: bool = True) -> None:
    """Log the run's headline to the parent (held-out means by policy version, the report), and finish it.

    Best effort: a run must not fail because the store went away at its very end.
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
        if finish:
            finish_run(tracked, "FINISHED")
    except Exception as error:
        logger.warning("cannot log the results of run %s to MLflow: %s", run_id, redact(str(error)))


def _store(recipe: Recipe) -> tuple[MlflowClient, str]:
    """A client of the recipe's store, and the id of the recipe's experiment in it."""
    uri = resolve_tracking_uri(recipe)
    check_store(uri)
    client = connect(uri)
    return client, _experiment(client, recipe, uri)


def _experiment(client: MlflowClient, recipe: Recipe, uri: str) -> str:
    name = recipe.tracking.experiment
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = sqlite_file(uri)
        # without a location MLflow would use ./mlruns of the task's working directory
        location = (database.absolute().parent / ARTIFACTS).as_uri() if database else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another execution made it
    if experiment is None or experiment.lifecycle_stage != "active":
        raise TrackingError(
            f"experiment {name!r} was deleted in {redact(uri)}; run `mlflow experiments restore`, or rename tracking.experiment"
        )
    return experiment.experiment_id


def _parent_tags(recipe: Recipe, execution_id: str | None) -> dict[str, str]:
    stages = " → ".join(f"{stage.kind} {stage.algorithm.name}" for stage in recipe.stages)
    note = f"Recipe **{recipe.name}**, seed {recipe.seed}: {recipe.rounds} × ({stages}), {recipe.policy.train} training."
    execution = {EXECUTION: execution_id} if execution_id else {}
    return {ROLE: "execution", DIGEST: recipe.digest, MACHINE: platform.node(), "mlflow.note.content": note, **execution}


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
