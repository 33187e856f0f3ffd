"""An online stage on a Ray of three machines, started by its packaged command as a RayJob starts
it, while machines die.

A machine is a container with an address of its own (machines.py). The stage rolls out one step
ahead, so that finished samples wait on the machine that dies. Every attempt at the task has a
cluster of its own, as KubeRay gives it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from flyteidl.core.errors_pb2 import ContainerError
from s3fs import S3FileSystem

from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.parent_run import start_run
from ebbflow.training.policy_metadata import write_base_policy
from tests.pipeline.pods import Package
from tests.ray_cluster.machines import CPUS, Machines
from tests.ray_cluster.stage import BUCKET, Ended, Stage

STEPS = 10
ON_RAY = {
    "placement": "ray",
    "resources": {
        "training": {"cpus": CPUS["training"]},
        "rollout": {"cpus": 0.5},
        "reward": {"cpus": 0.5},
    },
}


@pytest.fixture(scope="module")
def stage_of(
    machines: Machines,
    packaged: Package,
    make_recipe: Callable[..., Recipe],
    make_prompts: Callable[..., list[Prompt]],
    base_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """``stage_of(name, **online)``: an execution of a small stage, all of them of the same base
    model and prompts.
    """
    folder = tmp_path_factory.mktemp("inputs")
    address = machines.environment
    key, secret = (address[f"FLYTE_AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    store = S3FileSystem(endpoint_url=address["FLYTE_AWS_ENDPOINT"], key=key, secret=secret)
    store.mkdir(BUCKET)
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(12)], PROMPTS),
        folder / "prompts.parquet",
    )

    def make(name: str, **online: Any) -> Stage:
        small = {
            "mode": "one_step_off",
            "steps": STEPS,
            "micro_batch": 4,
            "checkpoints": {"every": 1},
        }
        recipe = make_recipe(
            online=small | online,
            rewards=[{"name": "similarity"}],
            guardrails=[],
            output=f"{BUCKET}/runs",
            name="ray-cluster",
        )
        inputs = f"{BUCKET}/inputs/{name}"
        write_base_policy(folder / name, verify_folder(base_folder), recipe.digest, recipe.policy)
        for path, called in (
            (base_folder, "base"),
            (folder / name, "policy"),
            (folder / "prompts.parquet", "prompts.parquet"),
        ):
            store.put(str(path), f"{inputs}/{called}", recursive=path.is_dir())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", address["MLFLOW_TRACKING_URI"])
            run = start_run(recipe, f"flytesnacks/development/{name}")
        return Stage(name, recipe, run, inputs, packaged, store, machines)

    return make


@pytest.fixture(scope="module")
def alone(machines: Machines, stage_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The stage in one process of one machine."""
    stage = stage_of("alone")
    log = tmp_path_factory.mktemp("alone") / "log"
    return stage.ended(
        machines.execute("gateway", *stage.command("train_online", 0), log=log), 0, log
    )


@pytest.fixture(scope="module")
def normal(machines: Machines, stage_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The stage on three machines, all of which live."""
    stage = stage_of("normal", **ON_RAY)
    log = tmp_path_factory.mktemp("normal") / "log"
    with machines.ray_cluster():
        return stage.ended(stage.submit(0, log), 0, log)


def after_a_death(stage: Stage, log: Path, dies: str, returns: bool) -> Ended:
    """The first attempt at a stage during which a machine dies, and another takes its place or
    not."""
    with stage.machines.ray_cluster():
        job = stage.submit(0, log)
        stage.wait_for_checkpoint(STEPS // 2, job)
        stage.machines.remove(dies)
        if returns:
            stage.machines.add(dies)
        return stage.ended(job, 0, log)


def test_three_machines_train_what_one_process_does(alone: Ended, normal: Ended) -> None:
    assert normal.replaced == 0
    assert normal.tensors == alone.tensors


def test_a_machine_of_rollouts_that_is_replaced_changes_nothing(
    stage_of: Any, normal: Ended, tmp_path: Path
) -> None:
    ended = after_a_death(
        stage_of("replaced", **ON_RAY), tmp_path / "log", "rollouts", returns=True
    )
    assert ended.error is None, ended.log
    assert ended.replaced >= 1
    assert ended.commit == normal.commit


def test_a_machine_of_rollouts_that_never_returns_is_named(stage_of: Any, tmp_path: Path) -> None:
    """The attempt ends well within ``MAX_SECONDS``, in an error after which Flyte starts
    another."""
    ended = after_a_death(stage_of("lost", **ON_RAY), tmp_path / "log", "rollouts", returns=False)
    assert ended.error is not None
    assert ended.error.kind == ContainerError.RECOVERABLE, ended.log
    says = (
        r"worker 0 of 1.1 online is gone, and in 300 s no machine had room for another: it asks for"
        r" 0.5 CPU, and others hold 2 of"
    )
    assert re.search(says, ended.error.message)
    assert "waits for 0.5 CPU" in ended.log


def test_a_stage_whose_training_machine_dies_resumes_in_a_second_attempt(
    stage_of: Any, normal: Ended, tmp_path: Path
) -> None:
    stage = stage_of("training", **ON_RAY)
    first = after_a_death(stage, tmp_path / "first", "training", returns=False)
    assert first.error is not None
    assert first.error.kind == ContainerError.RECOVERABLE, first.log
    assert re.search(
        r"training rank 0 of 1.1 online died in step \d+ .*Start it again", first.error.message
    )
    with stage.machines.ray_cluster():
        second = stage.ended(stage.submit(1, tmp_path / "second"), 1, tmp_path / "second")
    assert second.error is None, second.log
    assert "checkpoint of step 1 saved" in first.log
    assert "checkpoint of step 1 saved" not in second.log, (
        "it starts where the first attempt stopped"
    )
    assert second.commit == normal.commit
