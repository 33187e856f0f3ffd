"""The parent run of an execution: found by its tags, and resumed when the execution is retried.

It is opened before any work starts, so here a store that is down is an error.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from mlflow import MlflowClient
from mlflow.entities import Run, SourceType
from mlflow.exceptions import MlflowException
from mlflow.tracking.context.default_context import DefaultRunContext
from mlflow.utils.git_utils import get_git_commit
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT, MLFLOW_SOURCE_NAME, MLFLOW_SOURCE_TYPE

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.storage.sources import COMMIT, DIRTY
from ebbflow.tracking import reconcile
from ebbflow.tracking.delivery import flatten_settings, log_params
from ebbflow.tracking.outage import deliver_saved_records
from ebbflow.tracking.reconcile import Ending, remove_ending
from ebbflow.tracking.store import (
    ARTIFACTS,
    DIGEST,
    EXECUTION,
    FOLDER,
    MACHINE,
    PARENT,
    ROLE,
    TrackingError,
    check_store,
    connect_to_store,
    create_run,
    find_run,
    find_sqlite_file,
    resolve_tracking_uri,
)

KIND = "mlflow.experimentKind"
TRAINING = "custom_model_development"
"""The tag, and its value, of experiments that train models. A UI with two modes goes by the address
instead (``ui.MODE``).
"""
UNCOMMITTED = "ebbflow.uncommitted_changes"
"""The tag of a run whose code differs from its git commit."""
RETRAINED_FROM = "ebbflow.retrained_from"
"""The tag of a run of a schedule that has ended well: the digest of what it was trained from."""
TURN = "ebbflow.turn"
"""The tag of the run of a turn of the flywheel: the turn, which ends after its run."""

logger = logging.getLogger(__name__)


def start_run(
    recipe: Recipe,
    execution_id: str | None,
    tags: Mapping[str, str] | None = None,
    source: str = "ebbflow",
) -> TrackedRun:
    """Open the parent run of an execution, or find it again when the execution is retried.

    Args:
        recipe: logged as parameters and as recipe.yaml.
        execution_id: identifies the execution across retries; None (no orchestrator) always opens a
            new run.
        tags: what ``find_stopped_run`` finds it by.
        source: the entry point, which MLflow shows as the run's source.

    Raises:
        TrackingError: the store cannot be used, or the execution has a run of another recipe.
    """
    client, experiment_id = _open_store(recipe)
    # Flyte's execution id is the same for all attempts of a task
    identity = {ROLE: "execution", EXECUTION: execution_id} if execution_id else {}
    run = find_run(client, experiment_id, identity) if identity else None
    if run is None:
        all_tags = (
            _build_source_tags(source, execution_id)
            | _build_parent_tags(recipe, execution_id)
            | dict(tags or {})
        )
        run = create_run(client, experiment_id, identity, all_tags, recipe.name)
    elif run.data.tags.get(DIGEST) != recipe.digest:
        raise TrackingError(
            f"execution {execution_id} is run {run.info.run_id} of recipe"
            f" {run.data.tags.get(DIGEST, 'unknown')[:12]}, not of {recipe.digest[:12]}; a changed"
            " recipe needs a new execution"
        )
    tracked = _build_tracked_run(recipe, run)
    open_run(recipe, tracked)
    logger.info(
        "MLflow run %s of recipe %s in %s",
        tracked.run_id,
        recipe.name,
        redact_secrets(tracked.tracking_uri),
    )
    return tracked


def find_stopped_run(recipe: Recipe, tags: Mapping[str, str]) -> TrackedRun | None:
    """Find the newest run of the recipe with these tags, to be resumed with ``reopen_run``.

    None if it FINISHED, unless it is the run of a turn of the flywheel, whose end is the next
    queue. None if its folder is not on this machine: deleting the folder is how a user starts over.
    A run that this machine was stopped in before it made the folder has no node yet.
    """
    client, experiment_id = _open_store(recipe)
    run = find_run(
        client, experiment_id, {ROLE: "execution", DIGEST: recipe.digest, **tags}, order="DESC"
    )
    if run is None or (run.info.status == "FINISHED" and TURN not in tags):
        return None
    tracked = _build_tracked_run(recipe, run)
    if Path(tracked.folder).is_dir():
        return tracked
    # No folder: either the user has deleted it, or the run was stopped before it made one. In the
    # second case it has no node, and it is this machine's: a server may be shared by several.
    is_of_this_machine = run.data.tags.get(MACHINE) == platform.node()
    has_no_node = find_run(client, experiment_id, {PARENT: tracked.run_id}) is None
    return tracked if is_of_this_machine and has_no_node else None


def find_execution_run(recipe: Recipe, execution_id: str) -> tuple[MlflowClient, Run] | None:
    """Find the parent run of an execution that has ended, with a client of its store; None where
    the execution has opened none.
    """
    client, experiment_id = _open_store(recipe)
    run = find_run(client, experiment_id, {ROLE: "execution", EXECUTION: execution_id})
    return (client, run) if run else None


def find_retraining(recipe: Recipe, inputs_digest: str) -> Run | None:
    """Find the newest run of a schedule that was trained from inputs with this digest."""
    client, experiment_id = _open_store(recipe)
    return find_run(client, experiment_id, {RETRAINED_FROM: inputs_digest}, order="DESC")


def tag_retraining(tracked: TrackedRun, inputs_digest: str) -> None:
    """Tag a run that has ended well, so that ``find_retraining`` finds it.

    Best effort, as in ``log_results``: without the tag the next night trains once more.
    """
    try:
        connect_to_store(tracked.tracking_uri).set_tag(
            tracked.run_id, RETRAINED_FROM, inputs_digest
        )
    except Exception as error:
        logger.warning(
            "cannot tag run %s in MLflow with what it was trained from, so the next night trains"
            " even if nothing changes: %s",
            tracked.run_id,
            redact_secrets(str(error)),
        )


def end_dead_runs(
    recipe: Recipe, find_ending: Callable[[str], Ending | None] | None = None
) -> list[tuple[Run, Ending]]:
    """Set the status of the runs in the recipe's experiment that are over and that MLflow shows as
    RUNNING (``reconcile``).
    """
    client, experiment_id = _open_store(recipe)
    return reconcile.end_dead_runs(client, [experiment_id], find_ending)


def open_run(recipe: Recipe, tracked: TrackedRun) -> None:
    """Set the run RUNNING, name it, and log its recipe as parameters and as recipe.yaml.
    Idempotent.
    """
    # before the status: a node that failed sets its parent FAILED when it is delivered
    deliver_saved_records(tracked)
    client = connect_to_store(tracked.tracking_uri)
    settings = recipe.model_dump(mode="json")
    # The run was created under the recipe's name, as its own has the run's id. Another name is one
    # that the user gave it, and stays.
    run = client.get_run(tracked.run_id)
    is_unnamed = run.info.run_name == recipe.name
    client.update_run(tracked.run_id, status="RUNNING", name=tracked.name if is_unnamed else None)
    remove_ending(client, run)
    client.set_tag(tracked.run_id, FOLDER, tracked.folder)
    # A run in a shared folder may be resumed on another machine, which then has its lock.
    client.set_tag(tracked.run_id, MACHINE, platform.node())
    log_params(client, tracked.run_id, flatten_settings(settings))
    client.log_text(tracked.run_id, yaml.safe_dump(settings, sort_keys=False), "recipe.yaml")


def reopen_run(recipe: Recipe, tracked: TrackedRun) -> None:
    """Resume a run that ``find_stopped_run`` has found. One that FINISHED stays so: only its turn
    of the flywheel goes on, and its report has been written.
    """
    client = connect_to_store(tracked.tracking_uri)
    if client.get_run(tracked.run_id).info.status != "FINISHED":
        open_run(recipe, tracked)


def format_run_name(recipe: Recipe, run_id: str) -> str:
    """The run's name in the UI: recipe, seed, and the short id that ends the name of its folder."""
    return f"{recipe.name}-seed{recipe.seed}-{run_id[:8]}"


def finish_run(tracked: TrackedRun, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
    """Set the status of the parent run."""
    client = connect_to_store(tracked.tracking_uri)
    client.set_terminated(tracked.run_id, status)
    if status == "FINISHED":
        remove_ending(client, client.get_run(tracked.run_id))


def log_results(
    tracked: TrackedRun,
    files: Sequence[Path],
    finish: bool = True,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Log the report's files and some metrics to the parent run, and finish it.

    Best effort: a run must not fail because the store went away at its very end.
    """
    client = connect_to_store(tracked.tracking_uri)
    run_id = tracked.run_id
    try:
        for file in files:
            client.log_artifact(run_id, str(file))
        for key, value in (metrics or {}).items():
            client.log_metric(run_id, key, value)
        if finish:
            finish_run(tracked, "FINISHED")
    except Exception as error:
        logger.warning(
            "cannot log the results of run %s to MLflow: %s", run_id, redact_secrets(str(error))
        )


def _open_store(recipe: Recipe) -> tuple[MlflowClient, str]:
    """A client of the recipe's store, and the id of the recipe's experiment in it."""
    uri = resolve_tracking_uri(recipe)
    # Here an outage is an error that names the store. Later it is only a warning (child_run).
    check_store(uri)
    client = connect_to_store(uri)
    return client, _ensure_experiment(client, recipe, uri)


def _ensure_experiment(client: MlflowClient, recipe: Recipe, uri: str) -> str:
    name = recipe.tracking.experiment
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = find_sqlite_file(uri)
        # Without a location MLflow would use ./mlruns of the task's working directory. A server
        # has its own, which the client must not overrule.
        location = (database.absolute().parent / ARTIFACTS).as_uri() if database else None
        try:
            return client.create_experiment(name, artifact_location=location, tags={KIND: TRAINING})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another execution made it
    if experiment is None or experiment.lifecycle_stage != "active":
        raise TrackingError(
            f"experiment {name!r} was deleted in {redact_secrets(uri)}; run `mlflow experiments"
            " restore`, or rename tracking.experiment"
        )
    if KIND not in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, KIND, TRAINING)
    return experiment.experiment_id


def _build_parent_tags(recipe: Recipe, execution_id: str | None) -> dict[str, str]:
    stages = []
    for stage in recipe.stages:
        branch = f" ({stage.branch})" if stage.branch else ""
        stages.append(f"{stage.kind} {stage.algorithm.name}{branch}")
    # MLflow shows it as the run's description, in Markdown
    note = (
        f"Recipe **{recipe.name}**, seed {recipe.seed}: {recipe.rounds} × ({' → '.join(stages)}),"
        f" {recipe.policy.train} training."
    )
    execution = {EXECUTION: execution_id} if execution_id else {}
    return {
        ROLE: "execution",
        DIGEST: recipe.digest,
        MACHINE: platform.node(),
        "mlflow.note.content": note,
        **execution,
    }


def _build_source_tags(source: str, execution_id: str | None) -> dict[str, str]:
    """MLflow's own tags: user, source, and the git commit of the code where it is in a
    repository."""
    kind = SourceType.JOB if execution_id else SourceType.LOCAL
    tags = {MLFLOW_SOURCE_NAME: source, MLFLOW_SOURCE_TYPE: SourceType.to_string(kind)}
    code = Path(__file__).parents[1]  # not the working directory, whose repository is the user's
    commit = get_git_commit(str(code)) if shutil.which("git") else None
    # A pod has no repository: it is told the commit that was registered, or that of its image.
    pod_commit = os.environ.get(COMMIT)
    if pod_commit and not commit:
        tags[MLFLOW_GIT_COMMIT] = pod_commit.removesuffix(DIRTY)
        if pod_commit.endswith(DIRTY):
            tags[UNCOMMITTED] = "true"
    if commit:
        from git import Repo  # fails to import where there is no git

        tags[MLFLOW_GIT_COMMIT] = commit
        with Repo(code, search_parent_directories=True) as repo:
            if repo.is_dirty():
                tags[UNCOMMITTED] = "true"
    # it names a source as well, the running script, which tags overrule
    user: dict[str, str] = DefaultRunContext().tags()
    return user | tags


def _build_tracked_run(recipe: Recipe, run: Run) -> TrackedRun:
    # The folder is not read from the run: recipe and id determine it, and a retry finds it again.
    name = f"{recipe.name}-{run.info.run_id[:8]}"
    if "://" in recipe.output:
        folder = f"{recipe.output.rstrip('/')}/{name}"
    else:
        folder = str(Path(recipe.output).absolute() / name)
    return TrackedRun(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        tracking_uri=resolve_tracking_uri(recipe),
        folder=folder,
        recipe_digest=recipe.digest,
        started_at=run.info.start_time / 1000,  # MLflow's times are in ms
        name=format_run_name(recipe, run.info.run_id),
        experiment=recipe.tracking.experiment,
        sinks=list(recipe.tracking.sinks),
    )
