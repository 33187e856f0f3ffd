"""``ebbflow replay``: a training step of a tracked run again, as a page with the pictures and as a
table.

What the step needs is found in the run's own folder and in its MLflow run; every folder is
verified.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import mlflow.artifacts
import pyarrow as pa
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from ebbflow.data.schema import SAMPLE_KEY
from ebbflow.models import ModelError
from ebbflow.models.hub import HubError
from ebbflow.models.prepare import cache_base_folder
from ebbflow.offline.replay import replay_offline_step
from ebbflow.online.replay import replay_online_step
from ebbflow.plots.images import MAX_SHARP_WIDTH, encode_data_uri, open_rgb_image
from ebbflow.plots.pages import create_page_environment
from ebbflow.recipe import Recipe
from ebbflow.registry.model_version import find_version
from ebbflow.registry.promotion import check_store_exists, download_version, find_data_folder
from ebbflow.stage import StageContext, StageFolders
from ebbflow.storage.artifacts import COMMIT, ArtifactError, check_replaceable, verify_folder
from ebbflow.storage.disk import write_text
from ebbflow.storage.tables import write_table
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
from ebbflow.training.replay import ReplayedStep, ReplayError

PAGE = "index.html"
TABLE = "samples.parquet"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedFolder:
    """A run: its MLflow run, its recipe, and the local folder with what its nodes made."""

    run: Run
    client: MlflowClient
    tracking_uri: str
    recipe: Recipe
    folder: Path


class Statistic(NamedTuple):
    """A metric of the step: None where it was not replayed, or not logged."""

    name: str
    replayed: float | None
    logged: float | None


class Group(NamedTuple):
    """The samples of a prompt, best first, each with its picture as a URI."""

    prompt: str
    target: str | None
    mean: float | None
    samples: list[tuple[dict[str, Any], str]]


@dataclass(frozen=True)
class Replay:
    """A replayed step, and what the run logged of it."""

    run_id: str
    label: str
    step: int
    samples: ReplayedStep
    logged: Mapping[str, float]

    def __str__(self) -> str:
        what = f"{len(self.samples.rows)} samples of {self.label}, step {self.step}"
        if not self.logged:
            return f"{what}; the run logged nothing of this step"
        if self.differing:
            return f"{what}; not what was logged: {', '.join(self.differing)}"
        return f"{what}, with the statistics that were logged"

    @property
    def statistics(self) -> list[Statistic]:
        names = dict.fromkeys([*self.samples.metrics, *sorted(self.logged)])
        return [
            Statistic(name, self.samples.metrics.get(name), self.logged.get(name)) for name in names
        ]

    @property
    def differing(self) -> list[str]:
        """Statistics whose replayed value is another than the logged one."""
        both = [
            one for one in self.statistics if one.replayed is not None and one.logged is not None
        ]
        return [one.name for one in both if one.replayed != one.logged]


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
    check_replaceable(target, overwrite=False)
    run = _open_run(named, recipe)
    ctx = _find_stage(run.recipe, stage)
    with tempfile.TemporaryDirectory(prefix="ebbflow-replay-") as scratch:
        folder, metadata = _find_policy_before(run, ctx)
        base = _find_base(run, metadata, base, Path(scratch))
        prompts = _find_prompts(run, ctx)
        logger.info("replaying step %d of %s of run %s", step, ctx.stage_label, run.run.info.run_id)
        if ctx.config.kind == "online":
            own = Checkpoints(ctx, run.folder / "checkpoints" / ctx.stage_label.replace(" ", "-"))
            checkpoints = own.copy_checkpoints(Path(scratch) / "checkpoints", step)
            unwritten = Path(scratch) / "policy"
            folders = StageFolders(base, folder, prompts, unwritten, _find_teachers(ctx))
            samples = replay_online_step(ctx, folders, step, checkpoints)
        else:
            samples = replay_offline_step(
                ctx, base, folder, prompts, step, processes, Path(scratch)
            )
    done = Replay(
        run.run.info.run_id, ctx.stage_label, step, samples, _read_logged_metrics(run, ctx, step)
    )
    check_replaceable(target, overwrite=False)
    target.mkdir(parents=True, exist_ok=True)
    _write_table(target / TABLE, run, done)
    write_text(target / PAGE, _render_page(run, done))
    return done


def _open_run(named: str, recipe: Recipe | None) -> TrackedFolder:
    """The run behind a folder or an id."""
    path = Path(named)
    local = path.is_dir()
    if recipe is None and local and "MLFLOW_TRACKING_URI" not in os.environ:
        uri = f"sqlite:///{path.absolute().parent / 'mlflow.db'}"
    else:
        uri = resolve_tracking_uri(recipe or Recipe())
    check_store_exists(uri)
    client = connect_to_store(uri)
    run = _find_run_of_folder(client, path.absolute()) if local else _find_run_by_id(client, named)
    its = _download_recipe(run, uri)
    folder = (
        path.absolute()
        if local
        else Path(its.output).absolute() / f"{its.name}-{run.info.run_id[:8]}"
    )
    if not (folder / "nodes").is_dir():
        raise ReplayError(
            f"{folder} does not hold what the nodes of run {run.info.run_id} made; give the folder"
            " of a local run"
        )
    return TrackedFolder(run, client, uri, its, folder)


def _find_run_by_id(client: MlflowClient, run_id: str) -> Run:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        raise ReplayError(
            f"{run_id!r} is neither a folder nor a run of this MLflow store; see --recipe"
        ) from error
    if run.data.tags.get(ROLE) != "execution":
        raise ReplayError(
            f"MLflow run {run_id} is no run of a recipe; give its parent run, or the run's folder"
        )
    return run


def _find_run_of_folder(client: MlflowClient, folder: Path) -> Run:
    """The run whose id begins as the folder's name ends."""
    start = folder.name.rpartition("-")[2]
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    token = None
    while True:
        page = client.search_runs(
            experiments, f"tags.`{ROLE}` = 'execution'", max_results=1000, page_token=token
        )
        if found := [run for run in page if start and run.info.run_id.startswith(start)]:
            return found[0]
        if not (token := page.token):
            raise ReplayError(
                f"the MLflow store next to {folder} has no run {start!r}; name its store with"
                " --recipe"
            )


def _download_recipe(run: Run, uri: str) -> Recipe:
    """The resolved recipe that the run logged.

    Raises:
        ReplayError: it is not the one that the run was started with.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = f"{run.info.artifact_uri}/recipe.yaml"
        path = mlflow.artifacts.download_artifacts(place, dst_path=folder, tracking_uri=uri)
        recipe = Recipe.model_validate(yaml.safe_load(Path(path).read_bytes()))
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
    ]
    found = [ctx for ctx in contexts if named in (ctx.stage_label, ctx.stage_label.split()[0])]
    if not found:
        raise ReplayError(
            f"the run has no stage {named!r}, only {', '.join(ctx.stage_label for ctx in contexts)}"
        )
    if found[0].config.kind == "custom":
        raise ReplayError(
            f"{found[0].stage_label} is a stage kind of your own, and what its samples are is known"
            " only to its code"
        )
    return found[0]


def _find_policy_before(run: TrackedFolder, ctx: StageContext) -> tuple[Path, PolicyMetadata]:
    """The policy folder that the stage started from."""
    labels = tuple(_iterate_labels_before(ctx))
    for folder in _list_node_outputs(run, f"policy/{COMMIT}"):
        with _skip_damaged_folder(folder.parent):
            metadata = read_policy_metadata(folder.parent)
            if (metadata.stages, metadata.recipe_digest) == (labels, run.recipe.digest):
                return folder.parent, metadata
    raise ReplayError(
        f"{run.folder} has no policy folder after {', '.join(labels) or 'no stage'}, which"
        f" {ctx.stage_label} began with"
    )


def _iterate_labels_before(ctx: StageContext) -> Iterator[str]:
    """Labels of the stages behind the policy that a stage started from: those in no branch, and the
    earlier ones of its own.
    """
    for index in range(ctx.round + 1):
        for stage, config in enumerate(ctx.recipe.stages):
            if (index, stage) >= (ctx.round, ctx.stage):
                return
            if config.branch is None or (index, config.branch) == (ctx.round, ctx.config.branch):
                yield ctx.recipe.stage_label(index, stage)


def _find_base(
    run: TrackedFolder, policy: PolicyMetadata, given: Path | None, scratch: Path
) -> Path:
    """The base model of a policy: given, in the run's folder, in the version that the run
    registered, or on the hub.
    """
    for folder in [given] if given else _iterate_base_candidates(run, policy, scratch):
        with _skip_damaged_folder(folder):
            if (digest := verify_folder(folder)) == policy.base_digest:
                return folder
            logger.warning("passed over %s: it is base model %s", folder, digest[:12])
    raise ReplayError(
        f"base model {policy.base_digest[:12]} is neither in {run.folder} nor in a version that the"
        " run registered; name its folder with --base"
    )


def _iterate_base_candidates(
    run: TrackedFolder, policy: PolicyMetadata, scratch: Path
) -> Iterator[Path]:
    """Where the base model of a run may be, what is near first."""
    yield from (path.parent for path in _list_node_outputs(run, f"base/{COMMIT}"))
    if version := find_version(run.client, run.recipe.promotion.model_name, run.run.info.run_id):
        data = find_data_folder(
            download_version(
                run.tracking_uri, version.name, str(version.version), scratch / "version"
            )
        )
        yield from (path.parent for path in data.glob(f"base/{COMMIT}"))
    if policy.model.is_on_hub:
        try:
            yield cache_base_folder(policy.model)
        except (HubError, ModelError, ArtifactError) as error:
            logger.warning("passed over %s: %s", policy.model.path, error)


def _find_prompts(run: TrackedFolder, ctx: StageContext) -> Path:
    branch = ctx.config.branch
    own = run.recipe.branch_label(ctx.round, branch).replace(" ", "-") if branch else "*"
    if found := sorted(
        run.folder.glob(f"nodes/{own}/{'branch_' if branch else ''}prompts.parquet")
    ):
        return found[0]
    raise ReplayError(
        f"{run.folder} has no prompts.parquet below nodes; give the folder of a local run"
    )


def _find_teachers(ctx: StageContext) -> dict[str, Path]:
    if elsewhere := [
        folder for folder in ctx.teacher_folders.values() if not Path(folder).is_dir()
    ]:
        raise ReplayError(
            f"the teacher {elsewhere[0]} is no folder of this machine, and the steps before need it"
        )
    return {copy: Path(folder) for copy, folder in ctx.teacher_folders.items()}


def _list_node_outputs(run: TrackedFolder, name: str) -> list[Path]:
    """What nodes of the run made under this name."""
    return sorted(run.folder.glob(f"nodes/*/{name}"))


@contextmanager
def _skip_damaged_folder(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ArtifactError, PolicyError) as error:
        logger.warning("passed over %s: %s", folder, error)


def _read_logged_metrics(run: TrackedFolder, ctx: StageContext, step: int) -> dict[str, float]:
    """The metrics that the stage logged with the step; of an offline stage also those of all its
    samples.
    """
    values = _read_node_metrics(run, ctx.stage_label, step)
    return values | _read_node_metrics(run, f"{ctx.stage_label} advantages", 0) if values else {}


def _read_node_metrics(run: TrackedFolder, name: str, step: int) -> dict[str, float]:
    node = find_run(
        run.client, run.run.info.experiment_id, {PARENT: run.run.info.run_id, NODE: name}
    )
    histories = (
        [run.client.get_metric_history(node.info.run_id, key) for key in node.data.metrics]
        if node
        else []
    )
    return {
        metric.key: metric.value
        for history in histories
        for metric in history
        if metric.step == step
    }


def _write_table(path: Path, run: TrackedFolder, done: Replay) -> None:
    scores = list(dict.fromkeys(name for row in done.samples.rows for name in row["scores"]))
    schema = pa.schema(
        [
            *SAMPLE_KEY,
            pa.field("seed", pa.int64(), nullable=False),
            pa.field("prompt", pa.string(), nullable=False),
            pa.field("target", pa.string()),
            pa.field("policy_version", pa.int64(), nullable=False),
            pa.field("reward", pa.float64()),
            *(pa.field(name, pa.float64()) for name in scores),
            pa.field("failure", pa.string()),
            pa.field("advantage", pa.float64()),
            pa.field("trained", pa.bool_(), nullable=False),
            pa.field("image", pa.binary(), nullable=False),
        ]
    )
    rows = [
        row | row["scores"] | {"image": png}
        for row, png in zip(done.samples.rows, done.samples.pngs, strict=True)
    ]
    about = {
        "run_id": done.run_id,
        "recipe_digest": run.recipe.digest,
        "stage": done.label,
        "step": done.step,
    }
    columns = [{name: row.get(name) for name in schema.names} for row in rows]
    statistics = {
        "replayed": done.samples.metrics,
        "logged": {k: v for k, v in done.logged.items() if math.isfinite(v)},
    }
    write_table(
        path, schema, pa.Table.from_pylist(columns, schema).to_batches(), about | statistics
    )


def _render_page(run: TrackedFolder, done: Replay) -> str:
    """One HTML page without references to other files or the network."""
    environment = create_page_environment(Path(__file__).parent)
    environment.filters["number"] = _format_number
    names = list(dict.fromkeys(name for row in done.samples.rows for name in row["scores"]))
    return environment.get_template("replay.html").render(
        recipe=run.recipe, replay=done, groups=_group_by_prompt(done), scores=names
    )


def _group_by_prompt(done: Replay) -> list[Group]:
    """The samples by prompt: the best prompt first, and its best sample first. What was not scored
    is last. Large pictures are small here; the table has them as they are.
    """
    pairs = [
        (row, encode_data_uri(image, image.width <= MAX_SHARP_WIDTH))
        for row, image in zip(
            done.samples.rows, map(open_rgb_image, done.samples.pngs), strict=True
        )
    ]
    pairs.sort(
        key=lambda pair: (
            pair[0]["prompt_id"],
            -_or_minus_infinity(pair[0]["reward"]),
            pair[0]["sample"],
        )
    )
    groups = [
        Group(
            samples[0][0]["prompt"],
            samples[0][0]["target"],
            _compute_mean([row["reward"] for row, _ in samples]),
            samples,
        )
        for samples in (
            list(group) for _, group in groupby(pairs, key=lambda pair: pair[0]["prompt_id"])
        )
    ]
    return sorted(groups, key=lambda group: -_or_minus_infinity(group.mean))


def _compute_mean(values: list[float | None]) -> float | None:
    scored = [value for value in values if value is not None]
    return fmean(scored) if scored else None


def _or_minus_infinity(value: float | None) -> float:
    return -math.inf if value is None else value


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
