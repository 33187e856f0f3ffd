"""Tasks that generate on all GPUs of their pod: a launcher starts a process for each."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from flytekit import PythonFunctionTask
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from ebbflow.data.prompts import write_prompts
from ebbflow.data.records import Champion
from ebbflow.data.schema import PROMPTS
from ebbflow.recipe import Recipe
from ebbflow.registry import download, lookup, trained_prompts
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table
from ebbflow.tracking.parent_run import start_run
from ebbflow.training import distributed
from ebbflow.training.distributed import Ranks
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.rounds import call_on_first
from tasks import elastic, fork_server, resources
from tasks.deployment import DeploymentConfig
from tasks.elastic import EveryGpu, EveryGpuTask
from tasks.evaluate_champion import evaluate_champion
from tasks.evaluate_policy import evaluate_policy
from tasks.generating_group import join_generating_group
from tasks.resources import LAUNCHER, generating_resources
from tasks.types import BaseModelArtifact, EvaluatedPolicy, TrainedPolicy
from tests.forked import separate_fork_server
from tests.glyph_stages import small_stage
from tests.two_processes import as_two_ranks


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


@pytest.fixture
def inputs(
    base_folder: Path, make_prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The inputs of an evaluation of the base model on eight prompts."""
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
    prompts = [*make_prompts(3, "validation"), *make_prompts(5, "held_out")]
    rows = [{**vars(prompt), "prompt_id": index} for index, prompt in enumerate(prompts)]
    write_prompts(pa.Table.from_pylist(rows, PROMPTS), table)
    base = FlyteDirectory(str(base_folder))
    return {
        "recipe": recipe,
        "run": start_run(recipe, None),
        "base": BaseModelArtifact(folder=base, seconds=0, finished_at=0),
        "prompts": FlyteFile(str(table)),
    }


@pytest.fixture
def policy(inputs: dict[str, Any], base_folder: Path, tmp_path: Path) -> Path:
    recipe = inputs["recipe"]
    write_base_policy(tmp_path / "start", verify_folder(base_folder), recipe.digest, recipe.policy)
    return tmp_path / "start"


def run_on_two_gpus(work: Any, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> Any:
    """Run a task as in a pod with two GPUs."""
    monkeypatch.setattr(elastic, "count_gpus", lambda: 2)
    # Ranks have what is patched here, also where an earlier test has trained: none of them trains.
    monkeypatch.setattr(fork_server, "_can_forks_train", lambda: True)
    with separate_fork_server():
        return EveryGpuTask(EveryGpu(**LAUNCHER), work.task_function).execute(**inputs)


def require_same_evaluation(evaluated: EvaluatedPolicy, alone: EvaluatedPolicy) -> None:
    """Check both what an evaluation says and its table."""
    assert evaluated.evaluation.held_out == alone.evaluation.held_out
    assert evaluated.evaluation.policy_digest == alone.evaluation.policy_digest
    table, table_alone = (read_table(Path(side.samples.path)) for side in (evaluated, alone))
    assert table.equals(table_alone)


def test_a_policy_and_the_champion_are_evaluated_with_two_processes_as_with_one(
    inputs: dict[str, Any], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = TrainedPolicy(folder=FlyteDirectory(str(policy)))
    alone = evaluate_policy(**inputs, policy=trained, label="alone")
    shared = run_on_two_gpus(evaluate_policy, monkeypatch, **inputs, policy=trained, label="shared")
    require_same_evaluation(shared, alone)

    asked = tmp_path / "asked"

    def find_champion(uri: str, name: str) -> Champion:
        with asked.open("a") as file:
            file.write(os.environ["RANK"])
        digests = {"recipe_digest": "r", "base_digest": "b"}
        return Champion(tracking_uri=uri, model_name=name, version="3", run_id="run", **digests)

    base = Path(inputs["base"].folder.path)
    monkeypatch.setattr(lookup, "find_champion", find_champion)
    monkeypatch.setattr(lookup, "find_anchor", lambda uri, name: find_champion(uri, name))
    monkeypatch.setattr(trained_prompts, "describe_trained_prompts", lambda *inputs: "")
    monkeypatch.setattr(
        download, "download_champion_folders", lambda version, into, own: (base, policy)
    )
    champion = run_on_two_gpus(evaluate_champion, monkeypatch, **inputs, before=alone)
    assert champion.version == "3"
    require_same_evaluation(champion.evaluated, alone)
    assert asked.read_text() == "00", "another rank could read another champion"


def wait_for_first_rank(recipe: Recipe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "TIMEOUT", timedelta(seconds=1))
        with join_generating_group(recipe):
            first = Ranks.current().rank == 0
            assert call_on_first(lambda: first)
            if first:
                time.sleep(2)
            assert call_on_first(lambda: first)


def test_a_rank_without_work_waits_longer_than_a_training_group_would(
    make_recipe, tmp_path: Path
) -> None:
    # The other rank has no micro-batch in the last round, and one of videos may take an hour.
    lo = distributed.LOOPBACK
    group = {distributed.STORE: str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": lo}
    as_two_ranks(wait_for_first_rank, make_recipe(), NCCL_SOCKET_IFNAME=lo, **group)
