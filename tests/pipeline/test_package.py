"""What a cluster gets to see: compiled offline, typed interfaces, stable names."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from flyteidl.admin import launch_plan_pb2, task_pb2, workflow_pb2
from flyteidl.core import interface_pb2, types_pb2

from tests.pipeline.conftest import PYFLYTE, ROOT

NAMES = Path(__file__).with_name("entities.txt")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("package") / "flyte.tgz"
    command = [
        str(PYFLYTE),
        "--pkgs",
        "workflows",
        "package",
        "--image",
        "ebbflow:test",
        "--source",
        ".",
        "--output",
        str(output),
        "-f",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def _entities(package: Path) -> Iterator[tuple[str, interface_pb2.TypedInterface]]:
    """(kind and name, interface) of every packaged entity."""
    with tarfile.open(package) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            if content is None or not member.name.endswith(".pb"):
                continue
            data = content.read()
            if member.name.endswith("_1.pb"):
                task = task_pb2.TaskSpec.FromString(data).template
                yield f"task {task.id.name}", task.interface
            elif member.name.endswith("_2.pb"):
                workflow = workflow_pb2.WorkflowSpec.FromString(data).template
                yield f"workflow {workflow.id.name}", workflow.interface
            else:
                plan = launch_plan_pb2.LaunchPlan.FromString(data)
                yield f"launch plan {plan.id.name}", interface_pb2.TypedInterface()


def test_names_are_the_committed_ones(package: Path) -> None:
    # Names are public API: renaming one orphans its history and its cache.
    assert sorted(name for name, _ in _entities(package)) == NAMES.read_text().split("\n")[:-1]


def test_interfaces_hold_no_pickle_and_no_untyped_structure(package: Path) -> None:
    checked = 0
    for name, interface in _entities(package):
        for variable, described in [*interface.inputs.variables.items(), *interface.outputs.variables.items()]:
            for kind in _leaves(described.type):
                checked += 1
                assert not kind.blob.format.lower().startswith("pythonpickle"), f"{name}: {variable} is a pickle"
                if kind.simple == types_pb2.STRUCT:
                    assert kind.HasField("metadata"), f"{name}: {variable} is a structure without a schema"
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
