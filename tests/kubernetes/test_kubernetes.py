"""The pipeline as pods of a real Kubernetes, of which two are deleted in the middle of their
training.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow.artifacts
import pytest
import yaml
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from kubernetes_cases import DATABASE, DELETED_AT, RUN, Kubernetes
from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.promotion import MarginsConfig
from ebbflow.storage.artifacts import verify_folder
from tests.glyph_stages import small_stage
from tests.pipeline.conftest import ROOT
from tests.pipeline.pods import Attempt, Cluster, Package, Values, execute
from tests.pipeline.servers import KEY, client_of, tracking_server

BUCKET = "s3://flyte"
WORKFLOW = "workflows.post_training.post_train"
STEPS = 12
"""Of each stage: enough for its pod to be deleted in the middle."""
ONLINE = {
    "kind": "online",
    "steps": STEPS,
    "prompts_per_step": 4,
    "group_size": 8,
    "micro_batch": 32,
}
OFFLINE = {
    "kind": "offline",
    "prompts": 4,
    "shards": 2,
    "group_size": 4,
    "micro_batch": 8,
    "batch_size": 8,
    "epochs": STEPS // 2,
}
CHANGES: dict[str, Any] = {
    "output": f"{BUCKET}/runs",
    # The gate is to let it pass: this is learnt in a few steps, and moves what the image statistics
    # measure. It decides on 24 held-out prompts and more.
    "prompts": {"count": 64, "validation": 4, "held_out": 24},
    "rewards": [{"name": "jpeg_incompressibility"}],
    "guardrails": [],
    "stages": [
        small_stage(
            stage | {"checkpoints": {"every": 1}, "optimizer": {"lr": 0.005, "weight_decay": 0.0}}
        )
        for stage in (ONLINE, OFFLINE)
    ],
}

MIB = 2**20
LOOK = """
cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes
cpu=/sys/fs/cgroup/cpu
cat /sys/fs/cgroup/cpu.max 2>/dev/null || echo $(cat $cpu/cpu.cfs_quota_us $cpu/cpu.cfs_period_us)
df --block-size=1 --output=size,fstype /dev/shm | tail -n 1
"""


@dataclass(frozen=True)
class Recorded:
    """What the run left in MLflow."""

    parent: Run
    nodes: dict[str, Run]
    """Child runs by their names."""
    series: dict[str, dict[str, list[int]]]
    """By child run and metric, the steps that have a value."""
    summary: dict[str, Any]
    champion: str | None
    """The version with this alias."""
    versions: list[str]
    policy: Path
    """The policy of the version, fetched from the registry."""


@pytest.fixture(scope="module")
def cluster(store: dict[str, str], kubernetes: Kubernetes, tracking: str) -> Cluster:
    environment = {**store, "HF_HUB_OFFLINE": "1", "MLFLOW_TRACKING_URI": tracking}
    return Cluster(client_of(store), BUCKET, environment, Path(), run=kubernetes.run_pod)


@pytest.fixture(scope="module")
def tracking(
    store: dict[str, str], address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """An MLflow server whose artifacts lie in the object store."""
    client_of(store).mkdir(BUCKET)
    keys = {
        "MLFLOW_S3_ENDPOINT_URL": store["FLYTE_AWS_ENDPOINT"],
        "AWS_DEFAULT_REGION": store["AWS_DEFAULT_REGION"],
    }
    keys |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY}
    folder = tmp_path_factory.mktemp("mlflow")
    with tracking_server(
        folder, address, os.environ.get(DATABASE), f"{BUCKET}/mlflow", keys
    ) as uri:
        yield uri


@pytest.fixture(scope="module")
def outputs(
    cluster: Cluster,
    kubernetes: Kubernetes,
    packaged: Package,
    tmp_path_factory: pytest.TempPathFactory,
) -> Values:
    """Of the workflow, run as pods; execution, experiment and model have the name of this run of
    the tests.
    """
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text()) | CHANGES
    settings["tracking"] = {"experiment": kubernetes.run}
    settings["promotion"] = {
        "model_name": kubernetes.run,
        "margins": dict.fromkeys(MarginsConfig.model_fields),
    }
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(Recipe)
    given = {
        "recipe": TypeEngine.to_literal(context, load_recipe(path), Recipe, kind).to_flyte_idl()
    }
    return execute(cluster, packaged, WORKFLOW, given, kubernetes.run)


@pytest.fixture(scope="module")
def recorded(
    outputs: Values, kubernetes: Kubernetes, tracking: str, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    client = MlflowClient(tracking, tracking)
    folder = tmp_path_factory.mktemp("recorded")
    runs = client.search_runs(
        [client.get_experiment_by_name(kubernetes.run).experiment_id], max_results=1000
    )
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    nodes = {run.info.run_name: run for run in runs if run is not parent}
    assert len(nodes) == len(runs) - 1, "a node has one run, however many attempts it took"
    model = client.get_registered_model(kubernetes.run)
    versions = [
        version.version for version in client.search_model_versions(f"name = '{kubernetes.run}'")
    ]
    source = client.get_model_version_download_uri(kubernetes.run, versions[-1])
    mlflow.artifacts.download_artifacts(
        source, dst_path=str(folder / "model"), tracking_uri=tracking
    )
    (commit,) = (folder / "model").rglob("policy/COMMIT")
    return Recorded(
        parent=parent,
        nodes=nodes,
        series={
            name: {key: _steps(client, run, key) for key in run.data.metrics}
            for name, run in nodes.items()
        },
        summary=json.loads(
            Path(
                client.download_artifacts(parent.info.run_id, "summary.json", str(folder))
            ).read_text()
        ),
        champion=model.aliases.get("champion"),
        versions=versions,
        policy=commit.parent,
    )


def _steps(client: MlflowClient, run: Run, key: str) -> list[int]:
    return [metric.step for metric in client.get_metric_history(run.info.run_id, key)]


def test_the_run_ends_promoted(recorded: Recorded) -> None:
    assert recorded.summary["promoted"]
    assert recorded.versions == [recorded.champion]
    assert {run.info.status for run in (recorded.parent, *recorded.nodes.values())} == {"FINISHED"}


def test_what_it_returns_and_what_mlflow_keeps_is_in_the_store(
    cluster: Cluster, outputs: Values, recorded: Recorded
) -> None:
    for name in ("report", "summary"):
        assert cluster.store.exists(outputs[name].scalar.blob.uri)
    assert cluster.store.glob(f"{BUCKET}/mlflow/**/summary.json")
    verify_folder(recorded.policy)


@pytest.mark.parametrize(
    ("task", "node"), list(zip(DELETED_AT, ["1.1 online", "1.2 offline"], strict=True))
)
def test_a_deleted_pod_saves_and_the_next_one_resumes(
    cluster: Cluster, kubernetes: Kubernetes, recorded: Recorded, task: str, node: str
) -> None:
    first, second = (pod for pod in cluster.pods if pod.endswith(task))
    place = first.partition(" ")[0]
    document = ErrorDocument.FromString(
        cluster.store.cat_file(f"{BUCKET}/metadata/{kubernetes.run}{place}/error.pb")
    )
    assert document.error.kind == ContainerError.RECOVERABLE
    preempted = re.search(
        rf"preempted .* after (\d+) of {STEPS} steps; a checkpoint is saved", document.error.message
    )
    assert preempted, document.error.message
    saved = [
        int(step)
        for step in re.findall(r"checkpoint of step (\d+) saved", kubernetes.printed[second])
    ]
    assert saved == list(range(int(preempted[1]) + 1, STEPS))
    series = recorded.series[node]
    assert sorted(series["loss"]) == list(range(STEPS))
    assert [key for key, steps in series.items() if len(set(steps)) < len(steps)] == []


def test_a_mapped_task_has_a_pod_for_each_shard(cluster: Cluster, recorded: Recorded) -> None:
    for task, node in (("generate_rollouts", "rollout"), ("score_rollouts", "scoring")):
        assert len([pod for pod in cluster.pods if task in pod]) == OFFLINE["shards"]
        assert {
            f"1.2 offline {node} {shard}" for shard in range(OFFLINE["shards"])
        } <= recorded.nodes.keys()


def test_pods_are_what_their_templates_say(kubernetes: Kubernetes, outputs: Values) -> None:
    pods = kubernetes.api.list_namespaced_pod(
        kubernetes.namespace, label_selector=f"{RUN}={kubernetes.run}"
    ).items
    assert len(pods) == len(kubernetes.printed) - len(DELETED_AT)
    assert {pod.metadata.labels["team"] for pod in pods} == {"post-training"}
    assert {pod.status.qos_class for pod in pods} == {"Guaranteed"}, (
        "requests are limits, so that they are evicted last"
    )
    assert {pod.spec.termination_grace_period_seconds for pod in pods} == {30, 120}


@pytest.mark.parametrize(
    ("task", "cores", "memory", "shared_memory"),
    [
        ("tasks.start_run.start_run", 1, 2048, None),
        ("tasks.train_online.train_online", 1, 3072, 192),
        (
            "tasks.train_offline.train_offline",
            2,
            4096,
            256,
        ),  # cores are those of each of two processes
    ],
)
def test_a_pod_finds_what_its_kind_asks_for(
    kubernetes: Kubernetes,
    packaged: Package,
    task: str,
    cores: int,
    memory: int,
    shared_memory: int | None,
) -> None:
    look = Attempt(
        f"look {task}", "", packaged.tasks[task], ["sh", "-c", LOOK], {"FLYTE_ATTEMPT_NUMBER": "0"}
    )
    limit, quota, shared = kubernetes.run_pod(look).splitlines()
    assert int(limit) == memory * MIB
    microseconds, period = map(int, quota.split())
    assert microseconds == cores * period
    if shared_memory:
        assert shared.split() == [str(shared_memory * MIB), "tmpfs"]
