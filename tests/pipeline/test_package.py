"""What a cluster gets to see: compiled offline, typed interfaces, stable names."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core import interface_pb2, types_pb2
from flyteidl.core.tasks_pb2 import TaskTemplate
from flytekit.core.type_engine import TypeEngine
from flytekit.extras.pydantic_transformer.transformer import PydanticTransformer
from pydantic import BaseModel

from ebbflow.data.records import StageRecord
from ebbflow.recipe import Recipe
from tasks.types import TrainedPolicy
from tests.pipeline.conftest import package

NAMES = Path(__file__).with_name("entities.txt")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("package"))


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            content = opened.extractfile(member)
            if content is not None and member.name.endswith(".pb"):
                yield member.name, content.read()


def _tasks(archive: Path) -> Iterator[TaskTemplate]:
    for name, data in _files(archive):
        if name.endswith("_1.pb"):
            yield task_pb2.TaskSpec.FromString(data).template


def _entities(archive: Path) -> Iterator[tuple[str, interface_pb2.TypedInterface]]:
    """(kind and name, interface) of every packaged entity."""
    for task in _tasks(archive):
        yield f"task {task.id.name}", task.interface
    for name, data in _files(archive):
        if name.endswith("_2.pb"):
            workflow = workflow_pb2.WorkflowSpec.FromString(data).template
            yield f"workflow {workflow.id.name}", workflow.interface
        elif name.endswith("_3.pb"):
            plan = launch_plan_pb2.LaunchPlan.FromString(data)
            yield f"launch plan {plan.id.name}", interface_pb2.TypedInterface()


def test_names_are_the_committed_ones(archive: Path) -> None:
    # Names are public API: renaming one orphans its history and its cache.
    assert sorted(name for name, _ in _entities(archive)) == NAMES.read_text().split("\n")[:-1]


def test_what_is_computed_is_cached_for_its_run_alone(archive: Path) -> None:
    shared = {
        "tasks.train_base_model.train_base_model",
        "tasks.download_base_model.download_base_model",
    }
    never = {
        f"tasks.{name}.{name}"
        for name in ("start_run", "plan_run", "request_approval", "write_report")
    }
    for task in _tasks(archive):
        name = task.id.name
        about = task.metadata
        ignored = list(about.cache_ignore_input_vars)
        assert about.discoverable == (name.startswith("tasks.") and name not in never), name
        if about.discoverable:
            assert about.discovery_version, name
            assert "run" in task.interface.inputs.variables, name
            assert ignored == (["run"] if name in shared else []), name


def test_interfaces_hold_no_pickle_and_no_untyped_structure(archive: Path) -> None:
    checked = 0
    for name, interface in _entities(archive):
        for variable, described in [
            *interface.inputs.variables.items(),
            *interface.outputs.variables.items(),
        ]:
            for kind in _leaves(described.type):
                checked += 1
                assert not kind.blob.format.lower().startswith("pythonpickle"), (
                    f"{name}: {variable} is a pickle"
                )
                if kind.simple == types_pb2.STRUCT:
                    assert kind.HasField("metadata"), (
                        f"{name}: {variable} is a structure without a schema"
                    )
                assert kind.simple != types_pb2.BINARY, f"{name}: {variable} is untyped"
    assert checked > 50


def _leaves(kind: types_pb2.LiteralType) -> Iterator[types_pb2.LiteralType]:
    if kind.HasField("collection_type"):
        yield from _leaves(kind.collection_type)
    elif kind.HasField("map_value_type"):
        yield from _leaves(kind.map_value_type)
    elif kind.HasField("union_type"):
        for variant in kind.union_type.variants:
            yield from _leaves(variant)
    else:
        yield kind


@pytest.mark.parametrize("kind", [Recipe, StageRecord, TrainedPolicy])
def test_a_type_is_described_once_and_as_flytekit_does_it(kind: type[BaseModel]) -> None:
    described = TypeEngine.to_literal_type(kind)
    TypeEngine.to_literal_type(kind | None)  # type: ignore[arg-type]
    again = TypeEngine.to_literal_type(kind)
    assert again.metadata is described.metadata
    assert PydanticTransformer().get_literal_type(kind).to_flyte_idl() == again.to_flyte_idl()
