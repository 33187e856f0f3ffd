"""A miniature of Flyte's engine: it runs a packaged workflow node by node, as a cluster would.

Every task is the command line of its container in a process of its own: the first
``Cluster.interpreters`` pods are new interpreters, the others forked from one that has imported
what takes seconds (tests/forked.py). What it shares with other tasks is an object store, where its
inputs and outputs lie serialised, and what ``Cluster.environment`` leads to. Home, temporary folder
and working directory are new for every pod and gone after it. Nodes run one after the other, each
once those that it waits for are done. ``Cluster.run`` puts something else in place of the process:
a pod of a real Kubernetes (tests/kubernetes). Nothing comes out of a cache. Left out, because the
pipeline uses none of it: conditionals, sleeping, launch plans as nodes, pods that are not made of a
pod template.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgpack
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.identifier_pb2 import Identifier
from flyteidl.core.literals_pb2 import (
    Binary,
    Binding,
    BindingData,
    Literal,
    LiteralCollection,
    LiteralMap,
    Primitive,
    Scalar,
    Union,
)
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.types_pb2 import Error, LiteralType, PromiseAttribute, SimpleType, TypeStructure
from flyteidl.core.workflow_pb2 import ArrayNode, Node, WorkflowTemplate
from fsspec import AbstractFileSystem
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from tests.forked import run_forked
from tests.pipeline.conftest import PYFLYTE

EXECUTE = ("pyflyte-execute", "pyflyte-map-execute")
M = TypeVar("M", bound=Message)
Values = Mapping[str, Literal]
Outputs = dict[str, Values]
"""The outputs of nodes by their ids; under the empty id, the inputs of the workflow."""


class PodFailed(Exception):
    """A pod left no outputs: says which one, and what it said last."""


@dataclass(frozen=True)
class Package:
    """Tasks and workflows by name."""

    tasks: dict[str, TaskTemplate]
    workflows: dict[str, WorkflowTemplate]


@dataclass(frozen=True)
class Attempt:
    """One pod that is to run."""

    name: str
    """The node's place in the workflow, the number of the attempt, and the task."""
    prefix: str
    """The URI below which it leaves its outputs or its error."""
    task: TaskTemplate
    command: list[str]
    """Of its container, with the values of this attempt."""
    environment: Mapping[str, str]
    """Of its container: the template's variables, Flyte's and the cluster's."""


@dataclass(frozen=True)
class Cluster:
    """Where pods run, and what an execution does to them."""

    store: AbstractFileSystem
    bucket: str
    """The URI below which the engine and the tasks leave their data."""
    environment: Mapping[str, str]
    """Of every pod: how it reaches the store and MLflow. It has no other variables than these,
    Flyte's and its container's.
    """
    homes: Path
    """Where the folders of pods are made and removed."""
    approves: Callable[[str], bool] = lambda signal: True
    """A person's answer to the gate with this name."""
    lost: Collection[str] = ()
    """Modules of tasks whose machine is lost right after the first attempt: Flyte hears nothing of
    it and starts a second.
    """
    broken: Collection[str] = ()
    """Modules of tasks whose pods never start."""
    interpreters: int = 0
    """So many of the first pods are new interpreters, as in a container; the others are forks."""
    pods: list[str] = field(default_factory=list)
    """The name of every attempt so far."""
    run: Callable[[Attempt], str] | None = None
    """Runs a pod to its end and returns what it printed; default: in a process of this machine."""


def decoded(archive: Path) -> Package:
    """What is in an archive of packaged workflows."""
    with tarfile.open(archive) as opened:
        files = {member.name: opened.extractfile(member) for member in opened.getmembers()}
        contents = {name: file.read() for name, file in files.items() if file}
    # The name ends in the number of the kind in flyteidl.core.ResourceType.
    tasks = [
        TaskSpec.FromString(content).template
        for name, content in contents.items()
        if name.endswith("_1.pb")
    ]
    specs = [
        WorkflowSpec.FromString(content)
        for name, content in contents.items()
        if name.endswith("_2.pb")
    ]
    return _by_name(
        tasks, [workflow for spec in specs for workflow in (spec.template, *spec.sub_workflows)]
    )


def execute(
    cluster: Cluster, package: Package, workflow: str, inputs: Values, execution: str
) -> Values:
    """The outputs of a workflow.

    Args:
        execution: its name, unique in the bucket.

    Raises:
        PodFailed: a task failed, or a person did not approve. The workflow's failure node has run.
    """
    engine = _Engine(cluster, execution, package)
    template = package.workflows[workflow]
    try:
        return _run_workflow(engine, template, inputs, "")
    except PodFailed as error:
        if template.HasField("failure_node"):
            node = template.failure_node
            values = _bind(node.inputs, {"": inputs}) | {"err": _error(str(error))}
            _run_node(engine, node, values, f"/{node.id}")
        raise


def _error(message: str) -> Literal:
    """What the input ``err`` of a failure node holds, as ``ResolveErrorInputLiteralData`` in
    flytepropeller makes it.
    """
    kind = LiteralType(simple=SimpleType.ERROR, structure=TypeStructure(tag="FlyteError"))
    value = Literal(scalar=Scalar(error=Error(message=message, failed_node_id="fn0")))
    return Literal(scalar=Scalar(union=Union(value=value, type=kind)))


@dataclass(frozen=True)
class _Engine:
    cluster: Cluster
    execution: str
    package: Package


# -------------------------------------------------------------------------------------------- nodes


def _run_workflow(engine: _Engine, workflow: WorkflowTemplate, inputs: Values, path: str) -> Values:
    return _bind(workflow.outputs, _run_nodes(engine, workflow.nodes, {"": inputs}, path))


def _run_nodes(engine: _Engine, nodes: Iterable[Node], outputs: Outputs, path: str) -> Outputs:
    """``outputs`` with those of all nodes; each starts when the nodes upstream are done."""
    waiting = {node.id: node for node in nodes}
    while waiting:
        node = next(
            node for node in waiting.values() if not set(node.upstream_node_ids) & waiting.keys()
        )
        outputs = outputs | {
            node.id: _run_node(engine, node, _bind(node.inputs, outputs), f"{path}/{node.id}")
        }
        del waiting[node.id]
    return outputs


def _run_node(engine: _Engine, node: Node, inputs: Values, path: str) -> Values:
    kind = node.WhichOneof("target")
    if kind == "task_node":
        return _run_task(
            engine, engine.package.tasks[node.task_node.reference_id.name], inputs, path
        )
    if kind == "array_node":
        return _run_array(engine, node.array_node, inputs, path)
    if kind == "gate_node" and node.gate_node.HasField("approve"):
        if engine.cluster.approves(node.gate_node.approve.signal_id):
            return inputs
        raise PodFailed(f"{path}: {node.gate_node.approve.signal_id} was not approved")
    if kind == "gate_node" and node.gate_node.HasField("signal"):
        signal = node.gate_node.signal
        if signal.type.simple != SimpleType.BOOLEAN:
            raise ValueError(f"{path} waits for another type than a boolean; add it to _run_node")
        answer = engine.cluster.approves(signal.signal_id)
        scalar = Scalar(primitive=Primitive(boolean=answer))
        return {signal.output_variable_name: Literal(scalar=scalar)}
    if kind == "workflow_node" and node.workflow_node.HasField("sub_workflow_ref"):
        return _run_workflow(
            engine, engine.package.workflows[node.workflow_node.sub_workflow_ref.name], inputs, path
        )
    raise ValueError(f"{path} is a {kind}, which this engine does not run; add it to _run_node")


def _run_task(engine: _Engine, task: TaskTemplate, inputs: Values, path: str) -> Values:
    """A task's outputs; where it is dynamic, those of the nodes that it compiled in its pod."""
    prefix = _attempts(engine, task, inputs, path)
    futures = _read(engine, f"{prefix}/futures.pb", DynamicJobSpec)
    if futures is None:
        return _outputs(engine, prefix)
    # Its nodes may name nothing but what came along.
    inner = _Engine(engine.cluster, engine.execution, _by_name(futures.tasks, futures.subworkflows))
    return _bind(futures.outputs, _run_nodes(inner, futures.nodes, {"": inputs}, path))


def _run_array(engine: _Engine, array: ArrayNode, inputs: Values, path: str) -> Values:
    """A mapped task: every pod gets all inputs and picks its own by the index in its
    environment."""
    task = engine.package.tasks[array.node.task_node.reference_id.name]
    lengths = {
        len(value.collection.literals)
        for name, value in inputs.items()
        if name not in array.bound_inputs
    }
    if len(lengths) != 1 or array.is_original_sub_node_interface.value:
        raise ValueError(
            f"{path} maps over inputs of lengths {lengths}, or over single inputs; add that to"
            " _run_array"
        )
    prefixes = [
        _attempts(engine, task, inputs, f"{path}/{index}", index) for index in range(*lengths)
    ]
    parts = [_outputs(engine, prefix) for prefix in prefixes]
    return {
        name: Literal(collection=LiteralCollection(literals=[part[name] for part in parts]))
        for name in parts[0]
    }


def _by_name(tasks: Iterable[TaskTemplate], workflows: Iterable[WorkflowTemplate]) -> Package:
    return Package(
        {task.id.name: task for task in tasks},
        {workflow.id.name: workflow for workflow in workflows},
    )


# ------------------------------------------------------------------------------------------- values


def _bind(bindings: Iterable[Binding], outputs: Outputs) -> Values:
    return {binding.var: _bound(binding.binding, outputs) for binding in bindings}


def _bound(data: BindingData, outputs: Outputs) -> Literal:
    kind = data.WhichOneof("value")
    if kind == "promise":
        return _attribute(outputs[data.promise.node_id][data.promise.var], data.promise.attr_path)
    if kind == "collection":
        literals = [_bound(item, outputs) for item in data.collection.bindings]
        return Literal(collection=LiteralCollection(literals=literals))
    if kind == "map":
        return Literal(
            map=LiteralMap(
                literals={key: _bound(item, outputs) for key, item in data.map.bindings.items()}
            )
        )
    return Literal(scalar=data.scalar)


def _attribute(value: Literal, path: Sequence[PromiseAttribute]) -> Literal:
    """What a path leads to: through lists and mappings of Flyte, then through a pydantic model,
    which is MessagePack.
    """
    if not path:
        return value
    keys = [getattr(step, step.WhichOneof("value") or "") for step in path]
    if value.HasField("collection"):
        return _attribute(value.collection.literals[keys[0]], path[1:])
    if value.HasField("map"):
        return _attribute(value.map.literals[keys[0]], path[1:])
    found = msgpack.unpackb(value.scalar.binary.value, strict_map_key=False)
    for key in keys:
        found = found[key]
    return Literal(scalar=Scalar(binary=Binary(value=msgpack.packb(found), tag="msgpack")))


def _outputs(engine: _Engine, prefix: str) -> Values:
    outputs = _read(engine, f"{prefix}/outputs.pb", LiteralMap)
    if outputs is None:
        raise PodFailed(f"{prefix}: the task ended without outputs and without an error")
    return dict(outputs.literals)


def _read(engine: _Engine, uri: str, kind: type[M]) -> M | None:
    store = engine.cluster.store
    return kind.FromString(store.cat_file(uri)) if store.exists(uri) else None


# --------------------------------------------------------------------------------------------- pods


def _attempts(
    engine: _Engine, task: TaskTemplate, inputs: Values, path: str, index: int | None = None
) -> str:
    """Where the first attempt left its outputs that neither was lost nor failed in a way that Flyte
    retries.
    """
    cluster = engine.cluster
    retries = task.metadata.retries.retries
    here = f"{cluster.bucket}/metadata/{engine.execution}{path}"
    cluster.store.pipe_file(f"{here}/inputs.pb", LiteralMap(literals=inputs).SerializeToString())
    lost = _module(task) in cluster.lost
    for attempt in range(1 + lost + retries):
        cluster.pods.append(f"{path}/{attempt} {task.id.name}")
        if _module(task) in cluster.broken:
            raise PodFailed(f"{cluster.pods[-1]}: ImagePullBackOff")
        said = _run_pod(engine, task, path, attempt, index)
        document = _read(engine, f"{here}/{attempt}/error.pb", ErrorDocument)
        if document is None and not (lost and attempt == 0):
            return f"{here}/{attempt}"
        if document and (
            document.error.kind == ContainerError.NON_RECOVERABLE or attempt == lost + retries
        ):
            raise PodFailed(f"{cluster.pods[-1]}:\n{document.error.message}\n{said}")
    raise AssertionError("the last attempt returns or raises")


def _run_pod(
    engine: _Engine, task: TaskTemplate, path: str, attempt: int, index: int | None
) -> str:
    """Run the container of one attempt to its end; what it printed."""
    cluster = engine.cluster
    container = _container(task)
    environment = (
        {variable["name"]: variable["value"] for variable in container.get("env", ())}
        | _identity(engine.execution, task.id, attempt)
        | ({} if index is None else _array_index(index))
        | dict(cluster.environment)
    )
    command = [_filled(argument, engine, path, attempt) for argument in container["args"]]
    prefix = f"{cluster.bucket}/metadata/{engine.execution}{path}/{attempt}"
    pod = Attempt(cluster.pods[-1], prefix, task, command, environment)
    return cluster.run(pod) if cluster.run else _run_process(engine, pod)


def _run_process(engine: _Engine, pod: Attempt) -> str:
    """In a process with a home of its own, which is gone when it has ended."""
    cluster = engine.cluster
    with tempfile.TemporaryDirectory(dir=cluster.homes) as home:
        own = {"PATH": f"{PYFLYTE.parent}{os.pathsep}{os.defpath}", "HOME": home, "TMPDIR": home}
        is_forked = pod.command[0] in EXECUTE and len(cluster.pods) > cluster.interpreters
        run = run_forked if is_forked else _run_interpreter
        done = run(pod.command, cwd=Path(home), env=own | dict(pod.environment), timeout=900)
    said = (done.stdout + done.stderr)[-5000:]
    if done.returncode:
        raise PodFailed(f"{pod.name} ended with {done.returncode}:\n{said}")
    _require_no_trace(engine, pod.prefix, home)
    return said


def _run_interpreter(
    command: list[str], *, cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """What a container really does: a new interpreter, or a shell."""
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def _container(task: TaskTemplate) -> dict[str, Any]:
    """The container of the pod template in which the task runs."""
    return primary(task, MessageToDict(task.k8s_pod.pod_spec))


def primary(task: TaskTemplate, pod: Mapping[str, Any]) -> dict[str, Any]:
    """The container of a pod in which the task runs."""
    (container,) = [
        one for one in pod["containers"] if one["name"] == task.config["primary_container_name"]
    ]
    return container


def _filled(argument: str, engine: _Engine, path: str, attempt: int) -> str:
    """An argument with the template variables that Flyte fills in when a pod starts."""
    metadata = f"{engine.cluster.bucket}/metadata/{engine.execution}{path}"
    raw = f"{engine.cluster.bucket}/raw/{engine.execution}{path}"
    values = {
        "{{.input}}": f"{metadata}/inputs.pb",
        "{{.outputPrefix}}": f"{metadata}/{attempt}",
        "{{.rawOutputDataPrefix}}": f"{raw}/{attempt}",
        "{{.checkpointOutputPrefix}}": f"{raw}/{attempt}/_flytecheckpoints",
        "{{.prevCheckpointPrefix}}": f"{raw}/{attempt - 1}/_flytecheckpoints" if attempt else "",
    }
    return re.sub(r"\{\{.*?\}\}", lambda variable: values[variable[0]], argument)


def _identity(execution: str, task: Identifier, attempt: int) -> dict[str, str]:
    return {
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_INTERNAL_EXECUTION_ID": execution,
        "FLYTE_INTERNAL_TASK_PROJECT": "flytesnacks",
        "FLYTE_INTERNAL_TASK_DOMAIN": "development",
        "FLYTE_INTERNAL_TASK_NAME": task.name,
        "FLYTE_INTERNAL_TASK_VERSION": task.version,
        "FLYTE_ATTEMPT_NUMBER": str(attempt),
    }


def _array_index(index: int) -> dict[str, str]:
    return {
        "BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX",
        "FLYTE_K8S_ARRAY_INDEX": str(index),
    }


def _require_no_trace(engine: _Engine, prefix: str, home: str) -> None:
    """A path of the pod among its outputs leads nowhere; here it has a name, in the task that reads
    it only an error.
    """
    for uri in engine.cluster.store.glob(f"{prefix}/*.pb"):
        if not uri.endswith("/error.pb") and home.encode() in engine.cluster.store.cat_file(uri):
            raise PodFailed(
                f"{engine.cluster.pods[-1]}: {Path(uri).name} names a path below {home}, which is"
                " gone with the pod"
            )


def _module(task: TaskTemplate) -> str:
    return task.id.name.rpartition(".")[0]
