"""Collect what a turn of the flywheel leaves for the next one."""

from __future__ import annotations

import shutil
from pathlib import Path

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.labels import fetch_labels
from tasks.resources import accelerated_resources
from tasks.types import BaseModelArtifact, EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **accelerated_resources())
def collect_bad_cases(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    before: EvaluatedPolicy,
    candidate: EvaluatedPolicy,
) -> FlyteDirectory:
    """Collect the prompts that went wrong, and the pairs of the candidate's pictures that people
    should label next.
    """
    from ebbflow.reward_training.folder import require_reward_model_config
    from ebbflow.reward_training.queue_folder import find_queue_folder
    from ebbflow.reward_training.turn import collect_next_turn

    folder = make_node_output(run, "next turn", "next_turn")
    collect_next_turn(
        recipe,
        fetch_artifact(base.folder),
        fetch_artifact(candidate.policy.folder),
        fetch_artifact(prompts),
        fetch_artifact(before.samples),
        fetch_artifact(candidate.samples),
        [fetch_labels(source) for source in require_reward_model_config(recipe).labels],
        folder,
    )
    if "://" not in run.folder:
        # Where `ebbflow label FOLDER RECIPE` finds the queue.
        queues = find_queue_folder(recipe)
        queues.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.suffix in (".parquet", ".jsonl"):
                shutil.copyfile(path, queues / f".{path.name}")
                Path(queues / f".{path.name}").replace(queues / path.name)
    return FlyteDirectory(str(folder))
