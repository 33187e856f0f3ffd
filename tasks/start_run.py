"""Check everything that can be checked before it costs anything, and open the run in MLflow."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import yaml
from flytekit import FlyteContextManager, current_context, task

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.recipe.stages import is_trained_in_group
from ebbflow.resume import find_turn, handle_interrupt, remember_run_folder
from ebbflow.rewards.built_in.model import list_unpinned_models
from ebbflow.run_list import RESOLVED_RECIPE, record_attempt
from ebbflow.storage.disk import create_private_folder, write_text
from ebbflow.storage.formats import RUN_FORMAT, RUN_FORMAT_FILE
from tasks.executions import ENDPOINT, find_ending
from tasks.resources import DEPLOYMENT, light_resources
from tasks.sources import CODE

logger = logging.getLogger(__name__)
SOURCE = "workflows/post_training.py"
"""What MLflow shows as the source of a run."""
_RUN_LOCK = ExitStack()
"""The lock on the folder of the local run that this process executes; it ends with the process."""


@task(**light_resources())
def start_run(recipe: Recipe) -> TrackedRun:
    """Open the parent run. A retry of the same execution finds it again, and so does a local run
    that is started again.
    """
    from ebbflow.preflight import check_recipe
    from ebbflow.registry.gate_policy import require_gate_policy
    from ebbflow.registry.looks import open_look
    from ebbflow.registry.signing import require_signing_key
    from ebbflow.tracking import parent_run
    from ebbflow.tracking.store import check_store, resolve_tracking_uri

    unpinned = list_unpinned_models(recipe)
    if unpinned:
        raise RecipeError(
            f"rewards: {unpinned[0]!r} names no version with its digest, so tasks could score with"
            " different ones; start the recipe with `ebbflow run` or `ebbflow submit`, which add"
            " them"
        )
    execution = current_context().execution_id
    # flytekit gives every local run the same id, whose name is "local".
    on_cluster = execution is not None and execution.name != "local"
    name = f"{execution.project}/{execution.domain}/{execution.name}" if on_cluster else None
    if not on_cluster and handle_interrupt not in FlyteContextManager.signal_handlers:
        FlyteContextManager.add_signal_handler(handle_interrupt)
    # Before anything costs time: a recipe that asks for what is not there fails here.
    processes = DEPLOYMENT.train_processes * DEPLOYMENT.train_nodes
    check_recipe(
        recipe,
        resolve_tracking_uri(recipe),
        on_cluster,
        DEPLOYMENT.train_context_parallel,
        processes,
        {"full": processes, "hybrid": DEPLOYMENT.train_processes, "replicated": 1}[
            DEPLOYMENT.train_sharding
        ],
    )
    # A recipe whose policy the gate would have to refuse at the end fails here as well.
    check_store(resolve_tracking_uri(recipe))
    require_gate_policy(recipe, resolve_tracking_uri(recipe))
    require_signing_key(f"a policy of {recipe.promotion.model_name!r}")
    if not on_cluster:
        _prepare_process(recipe)
    run = parent_run.start_run(recipe, name, source=SOURCE) if name else _start_or_resume(recipe)
    _end_dead_runs(recipe)
    _clean_earlier_runs(recipe)
    return open_look(run, recipe.promotion.model_name)


def _end_dead_runs(recipe: Recipe) -> None:
    """Set the status of earlier runs that MLflow shows as RUNNING although they are over."""
    from ebbflow.tracking import parent_run

    # A pod can ask Flyte where the deployment tells it how.
    ask = find_ending if os.environ.get(ENDPOINT) else None
    try:
        parent_run.end_dead_runs(recipe, ask)
    except Exception as error:
        # Another run's status is not worth this run.
        logger.warning("cannot look for runs that are over: %s", redact_secrets(str(error)))


def _clean_earlier_runs(recipe: Recipe) -> None:
    """Delete what the recipe's ``retention`` does not keep."""
    from ebbflow.retention import clean
    from ebbflow.tracking.store import resolve_tracking_uri

    try:
        freed = clean(recipe, resolve_tracking_uri(recipe))
    except Exception as error:
        # As above: what earlier runs left is not worth this one.
        logger.warning("cannot clean earlier runs: %s", redact_secrets(str(error)))
        return
    if freed:
        logger.info("deleted %.1f MB of earlier runs (retention)", freed / 1e6)


def _prepare_process(recipe: Recipe) -> None:
    """Prepare what pods prepare for themselves: the process that ranks are forked from, and Ray's
    temporary folder.
    """
    from ebbflow.tracking.store import find_sqlite_file, resolve_tracking_uri
    from tasks.fork_server import preload_fork_server

    if any(map(is_trained_in_group, recipe.stages)):
        if find_sqlite_file(resolve_tracking_uri(recipe)):
            # This process opens the store next, and so does rank 0: what is imported for it takes
            # seconds of silence.
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
        preload_fork_server(recipe)
    uses_ray = any(stage.kind == "online" and stage.placement == "ray" for stage in recipe.stages)
    if uses_ray and os.environ.get("RAY_TMPDIR") == "/tmp":
        # In /tmp/ray another user could replace Ray's sockets.
        os.environ["RAY_TMPDIR"] = str(create_private_folder(Path("/tmp")))


def _start_or_resume(recipe: Recipe) -> TrackedRun:
    """Return the stopped run of this recipe, if code and inputs are unchanged; else a new one.

    Flyte's cache holds what the stopped run had finished under that run, so resuming means using
    the same run.
    """
    from ebbflow.storage.identity import compute_code_digest, compute_inputs_digest
    from ebbflow.storage.locks import lock_folder
    from ebbflow.tracking import parent_run
    from ebbflow.tracking.parent_run import TURN

    tags = {
        "ebbflow.code_digest": compute_code_digest(*CODE),
        "ebbflow.inputs_digest": compute_inputs_digest(recipe),
    }
    # A turn is over after its run: the tag finds a run that FINISHED while its turn had not.
    turn = find_turn()
    if turn:
        tags[TURN] = turn
    stopped = parent_run.find_stopped_run(recipe, tags)
    run = stopped or parent_run.start_run(recipe, None, tags, SOURCE)
    if "://" in run.folder:
        return run
    # A process that executes several runs still has the lock of the one before.
    _RUN_LOCK.close()
    fix = f"wait until it ends, or set another 'output' than {recipe.output!r}"
    _RUN_LOCK.enter_context(lock_folder(Path(run.folder), fix))
    remember_run_folder(run.folder)
    record_attempt(Path(run.folder))
    write_text(
        Path(run.folder) / RESOLVED_RECIPE,
        yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False),
    )
    write_text(Path(run.folder) / RUN_FORMAT_FILE, f"{RUN_FORMAT}\n")
    if stopped:
        logger.info(
            "resuming the stopped run (MLflow run %s); to start over, delete %s",
            run.run_id,
            run.folder,
        )
        parent_run.reopen_run(recipe, run)
    return run
