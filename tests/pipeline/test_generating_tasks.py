"""Tasks that generate on all GPUs of their pod: a launcher starts a process for each."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from flytekit import PythonFunctionTask
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table
from ebbflow.tracking.parent_run import start_run
from ebbflow.training.policy_metadata import write_base_policy
from tasks import elastic, resources
from tasks.deployment import DeploymentConfig
from tasks.elastic import EveryGpu, EveryGpuTask
from tasks.evaluate_policy import evaluate_policy
from tasks.resources import LAUNCHER, generating_resources
from tasks.types import BaseModelArtifact, TrainedPolicy
from tests.forked import separate_fork_server
from tests.glyph_stages import small_stage


def test_a_pod_with_several_gpus_has_a_launcher_and_one_without_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "count_gpus", lambda: 0)
    assert "task_config" not in generating_resources()
    deployment = DeploymentConfig.model_validate({"accelerated": {"gpus": 8}})
    monkeypatch.setattr(resources, "DEPLOYMENT", deployment)
    arguments = generating_resources()
    assert isinstance(arguments["task_config"], EveryGpu)
    assert arguments["requests"].gpu == "8"


@pytest.mark.parametrize(
    ("num_gpus", "engine", "processes"),
    [(0, "diffusers", 1), (1, "diffusers", 1), (8, "diffusers", 8), (8, "vllm_omni", 1)],
)
def test_the_gpus_of_the_pod_say_how_many_processes_generate(
    num_gpus: int, engine: str, processes: int, monkeypatch: pytest.MonkeyPatch, make_recipe
) -> None:
    recipe = make_recipe()
    stage = recipe.stages[1].model_copy(update={"engine": engine})
    recipe = recipe.model_copy(update={"stages": [recipe.stages[0], stage]})
    monkeypatch.setattr(elastic, "count_gpus", lambda: num_gpus)
    started = []
    monkeypatch.setattr(
        elastic.GracefulElasticTask,
        "execute",
        lambda self, **inputs: started.append(self._count_processes(**inputs)),
    )
    monkeypatch.setattr(PythonFunctionTask, "execute", lambda self, **inputs: started.append(1))
    launched = EveryGpuTask(EveryGpu(**LAUNCHER), evaluate_policy.task_function)
    launched.execute(recipe=recipe, stage=1)
    assert started == [processes]


def test_the_task_evaluates_with_two_processes_what_one_does(
    base_folder: Path, make_prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = Recipe.model_validate(
        {
            "output": str(tmp_path / "runs"),
            "rewards": [{"name": "similarity"}],
            "guardrails": [],
            "stages": [small_stage({"kind": "online"})],
            "evaluation": {"steps": 2, "micro_batch": 2, "samples": 1},
        }
    )
    table = tmp_path / "prompts.parquet"
    start = tmp_path / "start"
    prompts = [*make_prompts(3, "validation"), *make_prompts(5, "held_out")]
    rows = [{**vars(prompt), "prompt_id": index} for index, prompt in enumerate(prompts)]
    write_prompts(pa.Table.from_pylist(rows, PROMPTS), table)
    write_base_policy(start, verify_folder(base_folder), recipe.digest, recipe.policy)
    inputs = {
        "recipe": recipe,
        "run": start_run(recipe, None),
        "base": BaseModelArtifact(
            folder=FlyteDirectory(str(base_folder)), seconds=0, finished_at=0
        ),
        "policy": TrainedPolicy(folder=FlyteDirectory(str(start))),
        "prompts": FlyteFile(str(table)),
    }
    alone = evaluate_policy(**inputs, label="alone")
    monkeypatch.setattr(elastic, "count_gpus", lambda: 2)
    launched = EveryGpuTask(EveryGpu(**LAUNCHER), evaluate_policy.task_function)
    with separate_fork_server():
        shared = launched.execute(**inputs, label="shared")
    assert shared.evaluation.held_out == alone.evaluation.held_out
    assert shared.evaluation.policy_digest == alone.evaluation.policy_digest
    assert read_table(Path(shared.samples.path)).equals(read_table(Path(alone.samples.path)))
