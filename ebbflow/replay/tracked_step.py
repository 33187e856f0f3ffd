"""``ebbflow replay``: a training step of a tracked run again, as a page with the pictures and as a
table.

What the step needs is found in the run's own folder and in its MLflow run; every folder is
verified.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlflow.artifacts
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from ebbflow.models import ModelError
from ebbflow.models.hub import HubError
from ebbflow.models.prepare import cache_base_folder
from ebbflow.offline.replay import replay_offline_step
from ebbflow.online.replay import replay_online_step
from ebbflow.recipe import Recipe
from ebbflow.registry.download import download_version, find_data_folder
from ebbflow.registry.model_version import check_store_exists, find_version
from ebbflow.replay.output import PAGE, TABLE, Replay, render_page, write_table_of_samples
from ebbflow.stage import StageContext, StageFolders
from ebbflow.storage.artifacts import COMMIT, ArtifactError, check_replaceable, verify_folder
from ebbflow.storage.disk import write_text
from ebbflow.tracking.store import (
    DIGEST,
    NODE,
    PARENT,
    ROLE,
    connect_to_store,
    find_run,
    resolve_tracking_uri,
)
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_metadata import PolicyError, PolicyMetadata, read_policy_metadata
from ebbflow.training.replay import ReplayError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedFolder:
    """A run: its MLflow run, its recipe, and the local folder with the outputs of its nodes."""

    run: Run
    client: MlflowClient
    tracking_uri: str
    recipe: Recipe
    folder: Path


def replay_step(
    named: str,
    stage: str,
    step: int,
    target: Path,
    recipe: Recipe | None = None,
    base: Path | None = None,
    processes: int = 2,
) -> Replay:
    """Replay a step of a run and write its page and its table to ``target``.

    Args:
        named: the run's folder, or the id of its MLflow run.
        stage: ``1.2``, or ``1.2 online``.
        step: from zero, as its metrics are logged.
        target: a folder that is new or empty.
        recipe: whose MLflow store the run is in.
        base: the base-model folder, where the run no longer has it.
        processes: of the training of an offline stage, which decide its batches.

    Raises:
        ReplayError: what the step needs is not there.
        ArtifactError: the target is in use.
        TrackingError: the store cannot be used.
    """
    # A replay can take hours, so the target is checked before it; and again before it is written.
    check_replaceable(target, overwrite=False)
    run = _open_run(named, recipe)
    ctx = _find_stage(run.recipe, stage)
    with tempfile.TemporaryDirectory(prefix="ebbflow-replay-") as scratch:
        folder, metadata = _find_policy_before(run, ctx)
        base = _find_base(run, metadata, base, Path(scratch))
        prompts = _find_prompts(run, ctx)
        logger.info("replaying step %d of %s of run %s", step, ctx.stage_label, run.run.info.run_id)
        if ctx.config.kind == "online":
            # Copies: the stage may still run and delete its checkpoints, and a replay must not
            # write into the run's folder.
            name = ctx.stage_label.replace(" ", "-")
            run_checkpoints = Checkpoints(ctx, run.folder / "checkpoints" / name)
            checkpoints = run_checkpoints.copy_checkpoints(Path(scratch) / "checkpoints", step)
            unwritten = Path(scratch) / "policy"
            folders = StageFolders(base, folder, prompts, unwritten, _find_teachers(ctx))
            samples = replay_online_step(ctx, folders, step, checkpoints)
        else:
            samples = replay_offline_step(
                ctx, base, folder, prompts, step, processes, Path(scratch)
            )
    # Read after the replay: where the run still trains, it may have logged the step meanwhile.
    logged = _read_logged_metrics(run, ctx, step)
    replay = Replay(run.run.info.run_id, ctx.stage_label, step, samples, logged)
    check_replaceable(target, overwrite=False)
    target.mkdir(parents=True, exist_ok=True)
    write_table_of_samples(target / TABLE, run.recipe, replay)
    write_text(target / PAGE, render_page(run.recipe, replay))
    return replay


def _open_run(named: str, recipe: Recipe | None) -> TrackedFolder:
    """Open the run behind a folder or an id."""
    path = Path(named)
    local = path.is_dir()
    # The default store of local runs is next to their folders, wherever this command is run from.
    if recipe is None and local and "MLFLOW_TRACKING_URI" not in os.environ:
        uri = f"sqlite:///{path.absolute().parent / 'mlflow.db'}"
    else:
        uri = resolve_tracking_uri(recipe or Recipe())
    # Otherwise MLflow would make an empty store at a mistyped path.
    check_store_exists(uri)
    client = connect_to_store(uri)
    run = _find_run_of_folder(client, path.absolute()) if local else _find_run_by_id(client, named)
    run_recipe = _download_recipe(run, uri)
    if local:
        folder = path.absolute()
    else:
        name = f"{run_recipe.name}-{run.info.run_id[:8]}"
        folder = Path(run_recipe.output).absolute() / name
    if not (folder / "nodes").is_dir():
        raise ReplayError(
            f"{folder} does not hold what the nodes of run {run.info.run_id} made; give the folder"
            " of a local run"
        )
    return TrackedFolder(run, client, uri, run_recipe, folder)


def _find_run_by_id(client: MlflowClient, run_id: str) -> Run:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise ReplayError(
            f"{run_id!r} is neither a folder nor a run of this MLflow store; see --recipe"
        ) from error
    # Runs of nodes are children of the run of a recipe, and only the parent has logged the recipe.
    if run.data.tags.get(ROLE) != "execution":
        raise ReplayError(
            f"MLflow run {run_id} is no run of a recipe; give its parent run, or the run's folder"
        )
    return run


def _find_run_of_folder(client: MlflowClient, folder: Path) -> Run:
    """Find the run whose id begins as the folder's name ends."""
    # "glyph-1a2b3c4d" is the folder of the run 1a2b3c4d...
    start = folder.name.rpartition("-")[2]
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    token = None
    while True:
        page = client.search_runs(
            experiments, f"tags.`{ROLE}` = 'execution'", max_results=1000, page_token=token
        )
        for run in page:
            if start and run.info.run_id.startswith(start):
                return run
        token = page.token
        if not token:
            raise ReplayError(
                f"the MLflow store next to {folder} has no run {start!r}; name its store with"
                " --recipe"
            )


def _download_recipe(run: Run, uri: str) -> Recipe:
    """Download the resolved recipe that the run logged.

    Raises:
        ReplayError: it is not the one that the run was started with.
    """
    with tempfile.TemporaryDirectory() as folder:
        uri_of_recipe = f"{run.info.artifact_uri}/recipe.yaml"
        path = mlflow.artifacts.download_artifacts(uri_of_recipe, dst_path=folder, tracking_uri=uri)
        recipe = Recipe.model_validate(yaml.safe_load(Path(path).read_bytes()))
    # An artifact can be replaced; the digest is a tag that was set as the run started.
    if recipe.digest != run.data.tags.get(DIGEST):
        raise ReplayError(
            f"recipe.yaml of run {run.info.run_id} is not the recipe that it was started with: its"
            " digest differs"
        )
    return recipe


def _find_stage(recipe: Recipe, named: str) -> StageContext:
    contexts = [
        StageContext(recipe, index, stage)
        for index in range(recipe.rounds)
        for stage in range(len(recipe.stages))
        if index < recipe.count_rounds(stage)
    ]
    # "1.2 online" and "1.2" both name a stage; the first part of a label is unique.
    matching = [ctx for ctx in contexts if named in (ctx.stage_label, ctx.stage_label.split()[0])]
    if not matching:
        raise ReplayError(
            f"the run has no stage {named!r}, only {', '.join(ctx.stage_label for ctx in contexts)}"
        )
    ctx = matching[0]
    if ctx.config.kind == "custom":
        raise ReplayError(
            f"{ctx.stage_label} is a stage kind of your own, and what its samples are is known"
            " only to its code"
        )
    return ctx


def _find_policy_before(run: TrackedFolder, ctx: StageContext) -> tuple[Path, PolicyMetadata]:
    """Find the policy folder that the stage started from."""
    # A policy's metadata lists the stages behind it, whatever node wrote the folder.
    labels = tuple(_iterate_labels_before(ctx))
    trained_before = tuple(_iterate_labels_before(ctx, was_trained=True))
    policies = []
    # COMMIT is written last, so what has it is whole.
    for folder in _list_node_outputs(run, f"policy/{COMMIT}"):
        with _skip_damaged_folder(folder.parent):
            policies.append((folder.parent, read_policy_metadata(folder.parent)))
    # A run that began with a trained policy skipped the stages ``only_from_base``. Its policies are
    # looked for last: their fewer stages also fit the policy that any other run began with.
    for stages in dict.fromkeys((labels, trained_before)):
        for path, metadata in policies:
            # Labels alone would also fit the policy of another recipe with the same stages.
            if (metadata.stages, metadata.recipe_digest) == (stages, run.recipe.digest):
                return path, metadata
    raise ReplayError(
        f"{run.folder} has no policy folder after {', '.join(labels) or 'no stage'}, which"
        f" {ctx.stage_label} began with"
    )


def _iterate_labels_before(ctx: StageContext, was_trained: bool = False) -> Iterator[str]:
    """Iterate over the labels of the stages behind the policy that a stage started from: those in
    no branch, and the earlier ones of its own branch in this round.

    Args:
        was_trained: the run began with a trained policy, and not with the base model.
    """
    for index in range(ctx.round + 1):
        for stage, config in enumerate(ctx.recipe.stages):
            if (index, stage) >= (ctx.round, ctx.stage):
                return
            if config.only_from_base and (was_trained or index > 0):
                continue
            if config.branch is None or (index, config.branch) == (ctx.round, ctx.config.branch):
                yield ctx.recipe.stage_label(index, stage)


def _find_base(
    run: TrackedFolder, policy: PolicyMetadata, named: Path | None, scratch: Path
) -> Path:
    """Find the base model of a policy: the folder that the user named, or one in the run's folder,
    in the version that the run registered, or on the hub.
    """
    # A folder that the user named is the only candidate: another must not take its place.
    candidates = iter([named]) if named else _iterate_base_candidates(run, policy, scratch)
    for folder in candidates:
        with _skip_damaged_folder(folder):
            digest = verify_folder(folder)
            if digest == policy.base_digest:
                return folder
            logger.warning("passed over %s: it is base model %s", folder, digest[:12])
    raise ReplayError(
        f"base model {policy.base_digest[:12]} is neither in {run.folder} nor in a version that the"
        " run registered; name its folder with --base"
    )


def _iterate_base_candidates(
    run: TrackedFolder, policy: PolicyMetadata, scratch: Path
) -> Iterator[Path]:
    """Iterate over the places where the base model of a run may be, the nearest first.

    It is a generator, so that nothing is downloaded where a near folder is the right one.
    """
    yield from (path.parent for path in _list_node_outputs(run, f"base/{COMMIT}"))
    version = find_version(run.client, run.recipe.promotion.model_name, run.run.info.run_id)
    # A registered version keeps the base model beside the policy, so it survives the run's folder.
    if version:
        model = download_version(
            run.tracking_uri, version.name, str(version.version), scratch / "version"
        )
        data = find_data_folder(model)
        yield from (path.parent for path in data.glob(f"base/{COMMIT}"))
    if policy.model.is_on_hub:
        try:
            yield cache_base_folder(policy.model)
        except (HubError, ModelError, ArtifactError) as error:
            logger.warning("passed over %s: %s", policy.model.path, error)


def _find_prompts(run: TrackedFolder, ctx: StageContext) -> Path:
    branch = ctx.config.branch
    if branch:
        # A branch trains on its own selection of the prompts.
        node = run.recipe.branch_label(ctx.round, branch).replace(" ", "-")
        pattern = f"nodes/{node}/branch_prompts.parquet"
    else:
        pattern = "nodes/*/prompts.parquet"
    tables = sorted(run.folder.glob(pattern))
    if tables:
        return tables[0]
    raise ReplayError(
        f"{run.folder} has no prompts.parquet below nodes; give the folder of a local run"
    )


def _find_teachers(ctx: StageContext) -> dict[str, Path]:
    missing = [folder for folder in ctx.teacher_folders.values() if not Path(folder).is_dir()]
    if missing:
        raise ReplayError(
            f"the teacher {missing[0]} is no folder of this machine, and the steps before need it"
        )
    return {copy: Path(folder) for copy, folder in ctx.teacher_folders.items()}


def _list_node_outputs(run: TrackedFolder, name: str) -> list[Path]:
    """List the files that nodes of the run wrote under this name."""
    return sorted(run.folder.glob(f"nodes/*/{name}"))


@contextmanager
def _skip_damaged_folder(folder: Path) -> Iterator[None]:
    # One damaged copy must not stop the search: another node or the registry may have a whole one.
    try:
        yield
    except (ArtifactError, PolicyError) as error:
        logger.warning("passed over %s: %s", folder, error)


def _read_logged_metrics(run: TrackedFolder, ctx: StageContext, step: int) -> dict[str, float]:
    """Read the metrics that the stage logged with the step; of an offline stage also those of all
    its samples.
    """
    values = _read_node_metrics(run, ctx.stage_label, step)
    if not values:
        return {}
    # An offline stage computes rewards and advantages in a node of its own, once, as step 0.
    return values | _read_node_metrics(run, f"{ctx.stage_label} advantages", 0)


def _read_node_metrics(run: TrackedFolder, name: str, step: int) -> dict[str, float]:
    node = find_run(
        run.client, run.run.info.experiment_id, {PARENT: run.run.info.run_id, NODE: name}
    )
    if node is None:
        return {}
    histories = [run.client.get_metric_history(node.info.run_id, key) for key in node.data.metrics]
    return {
        metric.key: metric.value
        for history in histories
        for metric in history
        if metric.step == step
    }
