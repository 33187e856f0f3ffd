"""The default pipeline as pods run it, beside ``pyflyte run`` of the same recipe on one machine:
nothing may differ but the time.

Pods share an S3 server and an MLflow server; some lose their machine after the first attempt and
are started again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow.artifacts
import msgpack
import pytest
import yaml
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import (
    Binary,
    Binding,
    BindingData,
    Literal,
    LiteralCollection,
    Scalar,
)
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.types_pb2 import LiteralType, OutputReference, PromiseAttribute, SimpleType
from flyteidl.core.workflow_pb2 import (
    ApproveCondition,
    GateNode,
    Node,
    SignalCondition,
    TaskNode,
    WorkflowTemplate,
)
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from fsspec.implementations.local import LocalFileSystem
from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.recipe import Recipe, load_recipe
from tests.forked import ForkedProgram
from tests.pipeline.conftest import PYFLYTE, ROOT, package
from tests.pipeline.pods import Cluster, Package, PodFailed, Values, decoded, execute
from tests.pipeline.servers import client_of, object_store, tracking_server

BUCKET = "s3://flyte"
MODEL = "ebbflow-tiny"
LOST = {
    "tasks.start_run",
    "tasks.generate_rollouts",
    "tasks.train_online",
    "tasks.train_offline",
    "tasks.register_policy",
    "tasks.promote_policy",
    "tasks.write_report",
}
TIMES = (
    "cost/",
    "seconds/",
    "ms_per_image/",
    "images_per_second",
    "utilisation/",
    "push/seconds",
    "system/",
)


@dataclass(frozen=True)
class Recorded:
    """What one run left in its MLflow store, without times."""

    summary: dict[str, Any]
    nodes: list[str]
    """Names of the child runs."""
    series: dict[str, list[tuple[int, float]]]
    """Every metric of the run and its child runs, as (step, value)."""
    aliases: list[list[str]]
    """Of every version of the model."""
    policy: str
    """The checksum over the newest version's policy folder."""


@dataclass(frozen=True)
class Machine:
    """A run without pods."""

    process: ForkedProgram
    tracking: str
    log: Path


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    with object_store() as variables:
        yield variables


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tracking_server(tmp_path_factory.mktemp("mlflow")) as uri:
        yield uri


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An online stage and an offline one in two shards, with a checkpoint at every step and a
    reward that costs nothing.
    """
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text())
    changes = {
        "output": f"{BUCKET}/runs",
        "rewards": [{"name": "similarity"}],
        "guardrails": [],
        "prompts": {
            "source": "ebbflow:datasets/words4/prompts.txt",
            "validation": 4,
            "held_out": 12,
        },
        "stages": [stage | {"checkpoints": {"every": 1}} for stage in settings["stages"]],
        "model": {"training": {"steps": 3, "batch": 4}},
        "evaluation": {"steps": 3, "samples": 1},
    }
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings | changes))
    return path


@pytest.fixture(scope="module")
def cluster(
    store: dict[str, str], tracking: str, tmp_path_factory: pytest.TempPathFactory
) -> Cluster:
    bucket = client_of(store)
    bucket.mkdir(BUCKET)
    environment = {
        **store,
        **_same_everywhere(),
        "MLFLOW_TRACKING_URI": tracking,
        "PYTHONPATH": str(ROOT),
    }
    homes = tmp_path_factory.mktemp("pods")
    return Cluster(bucket, BUCKET, environment, homes, lost=LOST, interpreters=1)


def _same_everywhere() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def machine(
    store: dict[str, str], recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """``pyflyte run`` of the recipe, which works beside the pods."""
    folder = tmp_path_factory.mktemp("machine")
    tracking = f"sqlite:///{folder}/mlflow.db"
    own = {"HOME": str(folder), "TMPDIR": str(folder), "MLFLOW_TRACKING_URI": tracking}
    own |= {"FLYTE_LOCAL_CACHE_ENABLED": "true", "EBBFLOW_LOCAL_CACHE": str(folder / "cache")}
    command = [
        str(PYFLYTE),
        "run",
        "workflows/post_training.py",
        "post_train",
        "--recipe",
        str(recipe),
    ]
    environment = os.environ | store | _same_everywhere() | own
    process = ForkedProgram(command, cwd=ROOT, env=environment, output=[folder / "log"])
    yield Machine(process, tracking, folder / "log")
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def flyte_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return decoded(package(tmp_path_factory.mktemp("package")))


@pytest.fixture(scope="module")
def outputs(cluster: Cluster, recipe: Path, machine: Machine, flyte_package: Package) -> Values:
    """Of the workflow, run as pods."""
    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(Recipe)
    given = {
        "recipe": TypeEngine.to_literal(context, load_recipe(recipe), Recipe, kind).to_flyte_idl()
    }
    return execute(cluster, flyte_package, "workflows.post_training.post_train", given, "a6f1")


@pytest.fixture(scope="module")
def as_pods(outputs: Values, tracking: str, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return _recorded(tracking, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def on_one_machine(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    assert machine.process.wait(timeout=1800) == 0, machine.log.read_text()[-5000:]
    return _recorded(machine.tracking, tmp_path_factory.mktemp("recorded"))


def _recorded(uri: str, downloads: Path) -> Recorded:
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name(Recipe().tracking.experiment)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [
        run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    assert {run.info.status for run in runs} == {"FINISHED"}
    versions = sorted(
        client.search_model_versions(f"name = '{MODEL}'"), key=lambda version: int(version.version)
    )
    source = client.get_model_version_download_uri(MODEL, versions[-1].version)
    mlflow.artifacts.download_artifacts(source, dst_path=str(downloads / "model"), tracking_uri=uri)
    (commit,) = (downloads / "model").rglob("policy/COMMIT")
    summary = Path(client.download_artifacts(parent.info.run_id, "summary.json", str(downloads)))
    return Recorded(
        summary=json.loads(summary.read_text()),
        nodes=sorted(run.info.run_name for run in children),
        series={
            f"{_node(run)}: {key}": values for run in runs for key, values in _series(client, run)
        },
        aliases=[sorted(version.aliases) for version in versions],
        policy=commit.read_text(),
    )


def _node(run: Run) -> str:
    """The node of a child run; the parent's own name is of one execution."""
    return str(run.info.run_name) if "mlflow.parentRunId" in run.data.tags else "parent"


def _series(client: MlflowClient, run: Run) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    for key in run.data.metrics:
        if not key.startswith(TIMES):
            yield (
                key,
                [
                    (metric.step, metric.value)
                    for metric in client.get_metric_history(run.info.run_id, key)
                ],
            )


@pytest.mark.exhaustive
def test_the_policy_has_the_same_bytes(as_pods: Recorded, on_one_machine: Recorded) -> None:
    assert as_pods.policy == on_one_machine.policy


@pytest.mark.exhaustive
def test_the_evaluations_and_the_verdict_are_the_same(
    as_pods: Recorded, on_one_machine: Recorded
) -> None:
    for key in ("before", "after", "promoted"):
        assert as_pods.summary[key] == on_one_machine.summary[key]
    assert as_pods.aliases == on_one_machine.aliases


@pytest.mark.exhaustive
def test_no_attempt_leaves_anything_twice(
    cluster: Cluster, as_pods: Recorded, on_one_machine: Recorded
) -> None:
    again = {pod.split(" ")[1].rpartition(".")[0] for pod in cluster.pods if "/1 " in pod}
    assert again | {"tasks.promote_policy"} == LOST  # the gate decides whether there is a promotion
    assert as_pods.nodes == on_one_machine.nodes
    assert len(set(as_pods.nodes)) == len(as_pods.nodes)
    assert as_pods.series == on_one_machine.series
    assert len(as_pods.aliases) == 1


@pytest.mark.exhaustive
def test_everything_that_the_workflow_returns_is_in_the_store(
    cluster: Cluster, outputs: Values
) -> None:
    for name in ("report", "summary"):
        assert cluster.store.exists(outputs[name].scalar.blob.uri)
    candidate = msgpack.unpackb(outputs["candidate"].scalar.binary.value)
    assert cluster.store.exists(f"{candidate['policy']['folder']['path']}/COMMIT")
    assert not list(cluster.homes.iterdir())


@pytest.mark.exhaustive
def test_eleven_pods_share_the_work_of_a_stage(
    cluster: Cluster, recipe: Path, flyte_package: Package, tmp_path: Path
) -> None:
    """A shard for each pod, more than have one digit: every sample is generated, scored and
    trained on once, and nothing depends on a disk they share.
    """
    homes = tmp_path / "homes"
    many = tmp_path / "recipe.yaml"
    settings = yaml.safe_load(recipe.read_text())
    homes.mkdir()
    stage = settings["stages"][1] | {"prompts": 11, "shards": 11, "group_size": 2, "batch_size": 22}
    prompts = settings["prompts"] | {"count": 48}
    # Of the other run of this store nothing is found or changed.
    others = {
        "output": f"{BUCKET}/many",
        "tracking": {"experiment": "many"},
        "promotion": {"model_name": "many"},
    }
    many.write_text(yaml.safe_dump(settings | {"stages": [stage], "prompts": prompts} | others))
    context = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(Recipe)
    given = {
        "recipe": TypeEngine.to_literal(context, load_recipe(many), Recipe, kind).to_flyte_idl()
    }
    own = replace(cluster, homes=homes, lost=(), interpreters=0, pods=[])
    found = execute(own, flyte_package, "workflows.post_training.post_train", given, "a6f2")
    for name in ("generate_rollouts", "score_rollouts"):  # a map task has a longer name
        assert sum(name in pod for pod in own.pods) == 11
    candidate = msgpack.unpackb(found["candidate"].scalar.binary.value)
    assert own.store.exists(f"{candidate['policy']['folder']['path']}/COMMIT")
    scored = own.store.glob(f"{BUCKET}/raw/a6f2/**/scores.parquet")
    assert len(scored) == 11


# ------------------------------------------------------------------------ the engine, without Flyte


def _shell(script: str, retries: int = 0) -> TaskTemplate:
    """A task whose container runs a shell script, with the folder of its outputs as ``$1``."""
    task = TaskTemplate(config={"primary_container_name": "primary"})
    task.id.name = "tasks.shell.shell"
    task.metadata.retries.retries = retries
    arguments = ["sh", "-c", f'mkdir -p "$1"; {script}', "sh", "{{.outputPrefix}}"]
    task.k8s_pod.pod_spec.update(
        {"containers": [{"name": "sidecar"}, {"name": "primary", "args": arguments}]}
    )
    return task


def _run(folder: Path, *scripts: str, retries: int = 0) -> Cluster:
    """The cluster after one task for each script, one after the other."""
    tasks = {str(index): _shell(script, retries) for index, script in enumerate(scripts)}
    nodes = [Node(id=f"n{name}", task_node=TaskNode()) for name in tasks]
    for name, node in zip(tasks, nodes, strict=True):
        node.task_node.reference_id.name = name
    homes = folder / "homes"
    homes.mkdir()
    cluster = Cluster(LocalFileSystem(auto_mkdir=True), str(folder), {}, homes)
    execute(cluster, Package(tasks, {"all": WorkflowTemplate(nodes=nodes)}), "all", {}, "e")
    return cluster


def test_what_a_pod_leaves_at_home_is_gone(tmp_path: Path) -> None:
    _run(
        tmp_path,
        'touch "$1/outputs.pb" "$HOME/here"',
        'test ! -e "$HOME/here" && touch "$1/outputs.pb"',
    )
    assert not list((tmp_path / "homes").iterdir())


def test_an_output_may_not_name_a_path_of_the_pod(tmp_path: Path) -> None:
    with pytest.raises(PodFailed, match=r"outputs\.pb names a path below"):
        _run(tmp_path, 'printf "%s/model" "$TMPDIR" > "$1/outputs.pb"')


def test_a_pod_without_outputs_fails(tmp_path: Path) -> None:
    with pytest.raises(PodFailed, match="without outputs"):
        _run(tmp_path, "true")


def test_a_pod_that_dies_tells_what_it_said_last(tmp_path: Path) -> None:
    with pytest.raises(PodFailed, match=r"(?s)ended with 3.*no more disk"):
        _run(tmp_path, "echo no more disk; exit 3")


@pytest.mark.parametrize(
    ("kind", "attempts"), [(ContainerError.NON_RECOVERABLE, 1), (ContainerError.RECOVERABLE, 3)]
)
def test_only_a_recoverable_error_is_tried_again(
    tmp_path: Path, kind: ContainerError.Kind, attempts: int
) -> None:
    error = tmp_path / "error.pb"
    started = tmp_path / "started"
    error.write_bytes(
        ErrorDocument(error=ContainerError(message="spot", kind=kind)).SerializeToString()
    )
    with pytest.raises(PodFailed, match="spot"):
        _run(tmp_path, f'cp {error} "$1"; echo once >> {started}', retries=2)
    assert len(started.read_text().split()) == attempts


def _asked(answer: bool) -> Values:
    """The outputs of a workflow that returns ``[3][1]["b"]`` of its input, once a person said
    yes."""
    model = Literal(
        scalar=Scalar(binary=Binary(value=msgpack.packb([0, {"b": "yes"}]), tag="msgpack"))
    )
    path = [
        PromiseAttribute(int_value=3),
        PromiseAttribute(int_value=1),
        PromiseAttribute(string_value="b"),
    ]
    given = BindingData(promise=OutputReference(var="given", attr_path=path))
    gate = Node(
        id="gate",
        inputs=[Binding(var="o0", binding=given)],
        gate_node=GateNode(approve=ApproveCondition(signal_id="promotion")),
    )
    passed = Binding(
        var="passed", binding=BindingData(promise=OutputReference(node_id="gate", var="o0"))
    )
    workflow = WorkflowTemplate(nodes=[gate], outputs=[passed])
    cluster = Cluster(
        LocalFileSystem(), "", {}, Path(), approves=lambda signal: answer and signal == "promotion"
    )
    inputs = {
        "given": Literal(
            collection=LiteralCollection(literals=[Literal(), Literal(), Literal(), model])
        )
    }
    return execute(cluster, Package({}, {"asked": workflow}), "asked", inputs, "e")


def test_a_gate_passes_on_what_a_person_approves() -> None:
    assert msgpack.unpackb(_asked(True)["passed"].scalar.binary.value) == "yes"


@pytest.mark.parametrize("answer", [True, False])
def test_a_gate_that_waits_for_a_value_passes_the_answer_on(answer: bool) -> None:
    signal = SignalCondition(
        signal_id="promotion",
        type=LiteralType(simple=SimpleType.BOOLEAN),
        output_variable_name="o0",
    )
    gate = Node(id="gate", gate_node=GateNode(signal=signal))
    promise = OutputReference(node_id="gate", var="o0")
    passed = Binding(var="passed", binding=BindingData(promise=promise))
    workflow = WorkflowTemplate(nodes=[gate], outputs=[passed])
    cluster = Cluster(LocalFileSystem(), "", {}, Path(), approves=lambda signal: answer)
    outputs = execute(cluster, Package({}, {"asked": workflow}), "asked", {}, "e")
    assert outputs["passed"].scalar.primitive.boolean == answer


def test_a_workflow_ends_where_a_person_says_no() -> None:
    with pytest.raises(PodFailed, match="promotion was not approved"):
        _asked(False)
