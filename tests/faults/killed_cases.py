"""A training stage in a process of its own, which dies where a test says; what it needs and leaves
lies in one folder.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging.handlers
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ebbflow.data.prompts import read_prompts
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard_from_folders
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.training import train_offline_folder
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import load_recipe
from ebbflow.rewards.combine import load_scorer
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.training.checkpoint import Checkpoints

POINTS = {
    "mid-rollout": "ebbflow.rollouts.generate:predict",
    "mid-scoring": "ebbflow.rewards.combine:Scorer.__call__",
    "mid-table": "ebbflow.storage.tables:pq.ParquetWriter.write_batch",
    "before the optimiser's step": "torch.optim.adamw:AdamW.step",
    "metrics": "ebbflow.stage:MetricsRecorder.log_metrics",
    "mid-update": "ebbflow.training.policy:Policy.blend_copy",
    "before shards": "ebbflow.training.checkpoint:Checkpoints.save_step",
    "mid-shard": "ebbflow.training.checkpoint:save_file",
    "before the manifest": "ebbflow.storage.artifacts:commit_folder",
    "after the manifest": "ebbflow.storage.artifacts:sync_path",
    "after COMMIT": "ebbflow.storage.artifacts:_replace_folder",
    "an older checkpoint goes": "ebbflow.training.checkpoint:Checkpoints._remove_old",
    "the policy folder": "ebbflow.training.policy:Policy.save_folder",
}
"""Where a process may die, by what it is doing: functions as they are named where they are looked
up.
"""


class Death(NamedTuple):
    """The ``number``-th call of a point, from 1, and whether the process dies as it begins or as it
    ends; what the call wrote to a file is then cut in half.
    """

    point: str
    number: int
    ends: bool


def attempt(folder: Path, name: str, death: Death | None) -> None:
    """The stage of ``folder/recipe.yaml``, from rollouts to the policy folder ``name``; what was
    finished before is kept.
    """
    torch.set_num_threads(1)
    calls = watch(death)
    recipe = load_recipe(folder / "recipe.yaml")
    recorder = MetricsRecorder()
    ctx = StageContext(recipe, 0, 0)
    checkpoints = Checkpoints(ctx, folder / f"{name}-checkpoints")
    folders = StageFolders(
        folder / "base", folder / "start", folder / "prompts.parquet", folder / name
    )
    logged = logging.handlers.BufferingHandler(1000)
    logging.getLogger("ebbflow").addHandler(logged)
    if ctx.config.kind == "online":
        train_online_folder(ctx, folders, recorder, checkpoints=checkpoints)
    else:
        stored = rollouts_and_advantages(ctx, folder, name)
        train_offline_folder(ctx, folders, *stored, recorder, checkpoints)
    said = {
        "rows": recorder.metrics_rows,
        "calls": calls,
        "logged": [record.getMessage() for record in logged.buffer],
    }
    (folder / f"{name}.json").write_text(json.dumps(said))


def rollouts_and_advantages(ctx: StageContext, folder: Path, name: str) -> tuple[list[Path], Path]:
    """What the nodes before the training leave behind; each runs again until it has."""
    base, start, prompts = (folder / each for each in ("base", "start", "prompts.parquet"))
    shards, scores = (
        [folder / f"{name}-{kind}-{shard}" for shard in range(2)] for kind in ("rollouts", "scores")
    )
    for shard in range(2):
        if not shards[shard].exists():
            generate_shard_from_folders(ctx, base, start, prompts, shard, shards[shard])
        if not scores[shard].exists():
            scorer = load_scorer(ctx.recipe.rewards, ())
            score_shard(ctx, scorer, read_prompts(prompts, "train"), shards[shard], scores[shard])
    write_advantages(ctx, scores, folder / f"{name}-advantages")
    return shards, folder / f"{name}-advantages"


def watch(death: Death | None) -> Counter[str]:
    """Count the calls of every point, and die at one."""
    calls: Counter[str] = Counter()
    for point, path in POINTS.items():
        module, _, names = path.partition(":")
        *owners, function = names.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, function, deadly(getattr(owner, function), point, calls, death))
    return calls


def deadly(
    function: Callable[..., Any], point: str, calls: Counter[str], death: Death | None
) -> Callable[..., Any]:
    """The function, counted in ``calls``; it kills this process where ``death`` says so."""
    numbers = itertools.count(1)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        number = next(numbers)
        calls[point] = number
        last = death is not None and (death.point, death.number) == (point, number)
        if last and not death.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **named)
        if last:
            for path in arguments:
                if isinstance(path, Path) and path.is_file():
                    os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call
