"""A local run is killed again and again and started again: it ends as a run that nothing happened
to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.recipe.promotion import MarginsConfig
from ebbflow.storage.artifacts import verify_folder
from tests.faults.again_cases import run_pipeline_until
from tests.glyph_stages import small_stage

FEW = {"group_size": 4, "micro_batch": 8}
RECIPE: dict[str, Any] = {
    # the gate is to let it pass: contrast is learnt in two steps
    "rewards": ["mine.contrast:Contrast"],
    "guardrails": [],
    # the gate needs 16
    "prompts": {"count": 76, "validation": 4, "held_out": 24},
    # contrast moves what the image statistics measure, and two steps are no large gain
    "promotion": {
        "model_name": "ebbflow-tiny",
        "error_budget": 0.5,
        "looks_per_year": 1,
        "margins": dict.fromkeys(MarginsConfig.model_fields),
    },
    "stages": [
        small_stage(
            {"kind": "online", "steps": 2, "prompts_per_step": 2, **FEW, "optimizer": {"lr": 0.003}}
        ),
        small_stage({"kind": "offline", "prompts": 4, **FEW, "batch_size": 8, "epochs": 1}),
    ],
}
DEATHS = [
    "ebbflow.evaluation.evaluate:evaluate_folder:1:after",
    # in the online stage, in pyflyte's own process
    "ebbflow.training.update:PolicyUpdater.update_policy:1:sigterm",
    "ebbflow.offline.rollouts:generate_shard_from_folders:2",
    # between two nodes: Flyte does not know yet that shard 0 has been scored
    "flytekit.core.local_cache:LocalTaskCache.set:2",
    # in the offline stage, in the processes of its group
    "ebbflow.training.update:PolicyUpdater.update_policy:1:sigterm",
    "mlflow:MlflowClient.create_model_version:1",
    # the challenger is named, the champion not yet
    "mlflow:MlflowClient.set_registered_model_alias:2",
]
pytestmark = pytest.mark.exhaustive
KNOWN_TO_MLFLOW_ALONE = {"1.2 offline scoring 0"}
"""Of the nodes that ended before a death, those that have to be repeated."""
TIMES = re.compile("seconds|ms_per_image|_per_second|utilisation|^cost/")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_pipeline_until(folder, RECIPE)
    return folder


@pytest.fixture(scope="module")
def ended() -> list[dict[str, int]]:
    """After each death, when which nodes had ended."""
    return []


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, ended: list[dict[str, int]]) -> Path:
    folder = tmp_path_factory.mktemp("disturbed")
    for start, death in enumerate([*DEATHS, ""]):
        printed = " ".join(run_pipeline_until(folder, RECIPE, death).replace("│", " ").split())
        assert ("resuming the stopped run" in printed) == (start > 0)
        assert (
            "was preempted (SIGTERM) after 1 of 2 steps; a checkpoint is saved" in printed
        ) == death.endswith(":sigterm")
        ended.append(
            {
                name: node.info.end_time
                for name, node in _nodes(folder)
                if node.info.status == "FINISHED"
            }
        )
    return folder


def _client(folder: Path) -> MlflowClient:
    uri = f"sqlite:///{folder}/runs/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _parent(folder: Path) -> Run:
    (parent,) = _client(folder).search_runs(["1"], "tags.`ebbflow.role` = 'execution'")
    return parent


def _nodes(folder: Path) -> list[tuple[str, Run]]:
    found = _client(folder).search_runs(
        ["1"], f"tags.`mlflow.parentRunId` = '{_parent(folder).info.run_id}'"
    )
    return sorted(
        ((node.data.tags["ebbflow.node"], node) for node in found), key=lambda node: node[0]
    )


def _series(folder: Path) -> Iterator[tuple[str, str, list[tuple[int, float]]]]:
    """(node, metric, its steps and values) of all that does not say how long something took; the
    parent's too.
    """
    client = _client(folder)
    for name, node in [("", _parent(folder)), *_nodes(folder)]:
        for key in sorted(node.data.metrics):
            if not TIMES.search(key):
                history = client.get_metric_history(node.info.run_id, key)
                yield name, key, sorted((metric.step, metric.value) for metric in history)


def _policies(folder: Path) -> dict[tuple[str, ...], str]:
    """Digest of the policy folder after these stages."""
    found = (path.parent for path in (folder / "runs").glob("tiny-*/nodes/*/policy/COMMIT"))
    return {
        tuple(json.loads((policy / "policy.json").read_text())["stages"]): verify_folder(policy)
        for policy in found
    }


def _summary(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "runs").glob("*/summary.json")
    return json.loads(path.read_text())


def test_every_policy_is_the_same_bytes(undisturbed: Path, disturbed: Path) -> None:
    assert set(_policies(undisturbed)) == {(), ("1.1 online",), ("1.1 online", "1.2 offline")}
    assert _policies(disturbed) == _policies(undisturbed)


def test_killed_attempts_leave_no_files(undisturbed: Path, disturbed: Path) -> None:
    def made(folder: Path) -> set[str]:
        (run,) = (folder / "runs").glob("tiny-*")
        return {str(path.relative_to(run)) for path in run.rglob("*")}

    assert "nodes/1.1-online/policy/COMMIT" in made(undisturbed)
    assert made(disturbed) == made(undisturbed)


def test_metrics_are_the_same_and_none_is_there_twice(undisturbed: Path, disturbed: Path) -> None:
    expected = list(_series(undisturbed))
    assert ("1.1 online", "reward/mean") in {(name, key) for name, key, _ in expected}
    assert list(_series(disturbed)) == expected
    for name, key, series in expected:
        assert len({step for step, _ in series}) == len(series), f"{name}: {key}"


def test_every_node_is_there_once_and_has_ended(undisturbed: Path, disturbed: Path) -> None:
    assert [name for name, _ in _nodes(disturbed)] == [name for name, _ in _nodes(undisturbed)]
    for folder in (undisturbed, disturbed):
        assert {node.info.status for _, node in [("", _parent(folder)), *_nodes(folder)]} == {
            "FINISHED"
        }


def test_nothing_that_had_ended_was_done_again(
    disturbed: Path, ended: list[dict[str, int]]
) -> None:
    assert [len(nodes) for nodes in ended] == sorted(len(nodes) for nodes in ended), (
        "no start fell back"
    )
    assert {
        name for before in ended for name in before if before[name] != ended[-1][name]
    } == KNOWN_TO_MLFLOW_ALONE


def test_one_version_is_registered_and_is_champion(undisturbed: Path, disturbed: Path) -> None:
    for folder in (undisturbed, disturbed):
        client = _client(folder)
        (version,) = client.search_model_versions("name = 'ebbflow-tiny'")
        assert len(client.search_logged_models(["1"])) == 1
        assert (
            client.get_model_version_by_alias("ebbflow-tiny", "champion").version == version.version
        )
        assert (
            client.get_model_version_by_alias("ebbflow-tiny", "challenger").version
            == version.version
        )
        assert version.tags["ebbflow.run_id"] == _parent(folder).info.run_id


def test_the_report_says_the_same(undisturbed: Path, disturbed: Path) -> None:
    expected = _summary(undisturbed)
    found = _summary(disturbed)
    assert found["promoted"]
    assert {key: found[key] for key in ("before", "after")} == {
        key: expected[key] for key in ("before", "after")
    }
