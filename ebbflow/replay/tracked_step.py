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
from ebbflow.stage import StageContext
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
    """A run: its MLflow run, its recipe, and the local folder with the outputs of its nodes."""

    run: Run
    client: MlflowClient
    tracking_uri: str
    recipe: Recipe
    folder: Path


class Statistic(NamedTuple):
    """A metric of the step: None where it was not replayed, or not logged.

    Example::

        Statistic("reward/mean", replayed=0.531, logged=0.531)
        Statistic("grad_norm", replayed=None, logged=0.84)  # nothing is trained in a replay
    """

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
    """A replayed step, and what the run logged of it.

    Attributes:
        label: of the stage, such as ``1.1 online``.
        logged: metrics by name; empty where MLflow has none of this step.
    """

    run_id: str
    label: str
    step: int
    samples: ReplayedStep
    logged: Mapping[str, float]

    def __str__(self) -> str:
        summary = f"{len(self.samples.rows)} samples of {self.label}, step {self.step}"
        if not self.logged:
            return f"{summary}; the run logged nothing of this step"
        if self.differing:
            return f"{summary}; not what was logged: {', '.join(self.differing)}"
        return f"{summary}, with the statistics that were logged"

    @property
    def statistics(self) -> list[Statistic]:
        names = dict.fromkeys([*self.samples.metrics, *sorted(self.logged)])
        return [
            Statistic(name, self.samples.metrics.get(name), self.logged.get(name)) for name in names
        ]

    @property
    def differing(self) -> list[str]:
        """Statistics whose replayed value is another than the logged one."""
        # Exactly equal: on the same machine a replay repeats every operation of the run.
        return [
            one.name
            for one in self.statistics
            if one.replayed is not None and one.logged is not None and one.replayed != one.logged
        ]


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
            # Copies, because the replay trains on from the last checkpoint before the step and
            # would write newer ones into the run's folder.
            name = ctx.stage_label.replace(" ", "-")
            run_checkpoints = Checkpoints(ctx, run.folder / "checkpoints" / name)
            checkpoints = run_checkpoints.copy_checkpoints(Path(scratch) / "checkpoints", step)
            samples = replay_online_step(
                ctx, base, folder, prompts, step, _find_teachers(ctx), checkpoints
            )
        else:
            samples = replay_offline_step(
                ctx, base, folder, prompts, step, processes, Path(scratch)
            )
    logged = _read_logged_metrics(run, ctx, step)
    replay = Replay(run.run.info.run_id, ctx.stage_label, step, samples, logged)
    check_replaceable(target, overwrite=False)
    target.mkdir(parents=True, exist_ok=True)
    _write_table(target / TABLE, run, replay)
    write_text(target / PAGE, _render_page(run, replay))
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
    """Iterate over the labels of the stages behind the policy that a stage started from: those in
    no branch, and the earlier ones of its own branch in this round.
    """
    for index in range(ctx.round + 1):
        for stage, config in enumerate(ctx.recipe.stages):
            if (index, stage) >= (ctx.round, ctx.stage):
                return
            if config.branch is None or (index, config.branch) == (ctx.round, ctx.config.branch):
                yield ctx.recipe.stage_label(index, stage)


def _find_base(
    run: TrackedFolder, policy: PolicyMetadata, named: Path | None, scratch: Path
) -> Path:
    """Find the base model of a policy: the folder that the user named, or one in the run's folder,
    in the version that the run registered, or on the hub.
    """
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


def _write_table(path: Path, run: TrackedFolder, replay: Replay) -> None:
    scores = list(dict.fromkeys(name for row in replay.samples.rows for name in row["scores"]))
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
        for row, png in zip(replay.samples.rows, replay.samples.pngs, strict=True)
    ]
    # The table's own metadata, so that it explains itself when it is copied.
    metadata = {
        "run_id": replay.run_id,
        "recipe_digest": run.recipe.digest,
        "stage": replay.label,
        "step": replay.step,
    }
    statistics = {
        "replayed": replay.samples.metrics,
        # The metadata is JSON, which has no NaN.
        "logged": {name: value for name, value in replay.logged.items() if math.isfinite(value)},
    }
    # Rewards may score some prompts only, so a row may lack the columns of others.
    columns = [{name: row.get(name) for name in schema.names} for row in rows]
    table = pa.Table.from_pylist(columns, schema)
    write_table(path, schema, table.to_batches(), metadata | statistics)


def _render_page(run: TrackedFolder, replay: Replay) -> str:
    """Render one HTML page without references to other files or the network."""
    environment = create_page_environment(Path(__file__).parent)
    environment.filters["number"] = _format_number
    names = list(dict.fromkeys(name for row in replay.samples.rows for name in row["scores"]))
    return environment.get_template("replay.html").render(
        recipe=run.recipe, replay=replay, groups=_group_by_prompt(replay), scores=names
    )


def _group_by_prompt(replay: Replay) -> list[Group]:
    """Group the samples by prompt: the best prompt first, and its best sample first. What was not
    scored is last. Large pictures are reduced here; the table has them as they are.
    """
    images = map(open_rgb_image, replay.samples.pngs)
    pairs = [
        (row, encode_data_uri(image, image.width <= MAX_SHARP_WIDTH))
        for row, image in zip(replay.samples.rows, images, strict=True)
    ]

    def order_of_sample(pair: tuple[dict[str, Any], str]) -> tuple[int, float, int]:
        row, _ = pair
        return row["prompt_id"], -_or_minus_infinity(row["reward"]), row["sample"]

    pairs.sort(key=order_of_sample)  # groupby joins neighbours only
    groups = []
    for _, members in groupby(pairs, key=lambda pair: pair[0]["prompt_id"]):
        samples = list(members)
        first = samples[0][0]
        scored = [row["reward"] for row, _ in samples if row["reward"] is not None]
        mean = fmean(scored) if scored else None
        groups.append(Group(first["prompt"], first["target"], mean, samples))
    return sorted(groups, key=lambda group: -_or_minus_infinity(group.mean))


def _or_minus_infinity(value: float | None) -> float:
    return -math.inf if value is None else value


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
