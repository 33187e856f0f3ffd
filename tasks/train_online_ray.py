"""Train an online stage with ``placement: ray``: the same loop, with training, rollouts and rewards
on a Ray cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_once_per_machine, save_run_file
from tasks.preemption import retry_on_errors
from tasks.resources import ray_cluster_resources
from tasks.train_online import train_stage
from tasks.types import BaseModelArtifact, TrainedPolicy

if TYPE_CHECKING:
    from ebbflow.stage import StageContext

# Set before Flyte's plugin starts Ray in a local run. Otherwise Ray reports its usage, and its
# socket paths, which may have about a hundred characters, begin with the run's temporary folder. A
# local run then sets a folder of this user (``start_run``).
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TMPDIR", "/tmp")


@task(cache=ONCE_PER_RUN, **ray_cluster_resources())
def train_online_ray(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> TrainedPolicy:
    """Train the stage; return its policy folder. Actors fetch what they load."""
    from ebbflow.stage import StageContext

    ctx = StageContext(recipe, round, stage)
    return train_stage_on_ray(ctx, run, base, policy, prompts, ctx.teacher_folders)


def train_stage_on_ray(
    ctx: StageContext,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    teachers: Mapping[str, str],
) -> TrainedPolicy:
    """Run the stage; when a training rank dies, or a worker that died cannot be replaced, the task
    is retried.

    Args:
        teachers: URIs of their policy folders, by the copy that each becomes.
    """
    from ebbflow.online.ray_actor import ActorFolders
    from ebbflow.online.ray_workers import RecoverableStageError

    # Functions and not folders: each actor fetches on its own machine, which this process, on the
    # head, has no disk in common with.
    base_uri = str(base.folder.remote_source or base.folder.path)
    policy_uri = str(policy.folder.remote_source or policy.folder.path)
    actors = ActorFolders(
        partial(fetch_once_per_machine, base_uri),
        partial(fetch_once_per_machine, policy_uri),
        {copy: partial(fetch_once_per_machine, uri) for copy, uri in teachers.items()},
    )
    with retry_on_errors(RecoverableStageError), keep_cluster_logs(run, ctx):
        return train_stage(ctx, run, Path(base.folder.path), policy, prompts, actors=actors)


@contextmanager
def keep_cluster_logs(run: TrackedRun, ctx: StageContext) -> Iterator[None]:
    """Keep the logs of the Ray cluster in the run's folder, however the stage ends: its pods are
    released at once.
    """
    from ebbflow.online.ray_logs import save_cluster_logs

    def save(name: str, packed: bytes) -> None:
        save_run_file(run, f"logs/{ctx.stage_label}/attempt-{attempt}-{name}", packed)

    attempt = os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")
    try:
        yield
    finally:
        # A local run's are on this machine, in the session that its log names.
        if "://" in run.folder:
            save_cluster_logs(save)
