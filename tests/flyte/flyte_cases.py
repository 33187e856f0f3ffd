"""What the cases have in common: a Flyte, its workflow, and what their fixtures are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest
from flyte_engine import Execution
from flyteidl.admin.common_pb2 import ObjectGetRequest
from flyteidl.admin.execution_pb2 import ExecutionCreateRequest, ExecutionMetadata, ExecutionSpec
from flyteidl.core.identifier_pb2 import LAUNCH_PLAN, Identifier
from flyteidl.core.identifier_pb2 import WORKFLOW as WORKFLOW_TYPE
from flyteidl.core.literals_pb2 import Literal
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.remote import FlyteRemote
from kubernetes.client import V1Pod
from mlflow import MlflowClient
from mlflow.entities import Run

from ebbflow.recipe import Recipe
from tests.forked import ROOT
from tests.pipeline.conftest import PYFLYTE

WORKFLOW = "workflows.post_training.post_train"
DRY_RUN = "workflows.post_training.dry_run"
COMMAND_SECONDS = 300
MAX_SECONDS = 3600
"""That an execution may take: a node may have to start and to pull the image."""
EDITED = 5.0
"""What the edited reward adds: no picture has so much otherwise."""
CLONE = (
    "ebbflow",
    "tasks",
    "workflows",
    "datasets",
    "pyproject.toml",
    "README.md",
    ".dockerignore",
)
REWARD = Path("ebbflow/rewards/built_in/jpeg.py")
KILOBYTES = "RewardResult(measure_kilobytes(images) / SCALE)"
Record = Callable[[str, Any], None]
"""``record_property``: what the table of the run shows."""
ListPods = Callable[..., list[V1Pod]]
Register = Callable[..., str]
MakeRecipe = Callable[..., Recipe]


@dataclass(frozen=True)
class Flyte:
    """A Flyte, and how pods of its executions reach MLflow and the object store."""

    remote: FlyteRemote
    config_file: Path
    project: str
    domain: str
    image: str
    mlflow: str
    output: str
    run: str
    """The name of this run of the tests, with which the names of its executions begin."""
    started: list[Execution] = field(default_factory=list)

    def start(
        self, workflow: str, version: str, recipe: Recipe, name: str, overwrite_cache: bool = False
    ) -> Execution:
        """Start a registered workflow with its default launch plan, as the console does."""
        context = FlyteContextManager.current_context()
        kind = TypeEngine.to_literal_type(Recipe)
        literal = TypeEngine.to_literal(context, recipe, Recipe, kind).to_flyte_idl()
        return self.start_plan(workflow, version, literal, name, overwrite_cache)

    def start_plan(
        self, plan: str, version: str, recipe: Literal, name: str, overwrite_cache: bool = False
    ) -> Execution:
        """Start a launch plan with a recipe as it takes it, and its other inputs at their
        defaults.
        """
        request = ExecutionCreateRequest(
            project=self.project,
            domain=self.domain,
            name=f"{self.run}-{name}",
            spec=ExecutionSpec(
                launch_plan=Identifier(
                    resource_type=LAUNCH_PLAN,
                    project=self.project,
                    domain=self.domain,
                    name=plan,
                    version=version,
                ),
                metadata=ExecutionMetadata(mode=ExecutionMetadata.MANUAL, principal="test"),
                overwrite_cache=overwrite_cache,
            ),
        )
        request.inputs.literals["recipe"].CopyFrom(recipe)
        execution = Execution(self.remote, self.remote.client.raw.create_execution(request).id)
        self.started.append(execution)
        return execution

    def pyflyte(
        self, *arguments: str, folder: Path = ROOT, status: int = 0, **environment: str
    ) -> str:
        """Run a command of pyflyte in a folder to its end, expect its exit status, and return what
        it printed.
        """
        command = [str(PYFLYTE), "--config", str(self.config_file), *arguments]
        return _run_command(command, environment, folder, status)

    def reconcile(self) -> str:
        """Let ``ebbflow reconcile`` ask this Flyte what became of the runs of MLflow."""
        variables = {"FLYTECTL_CONFIG": str(self.config_file), "MLFLOW_TRACKING_URI": self.mlflow}
        return _run_command([str(PYFLYTE.with_name("ebbflow")), "reconcile"], variables)

    def start_ebbflow(self, output: IO[str], *arguments: str) -> subprocess.Popen[str]:
        """Start a command of ebbflow that talks to this Flyte; it prints into a file."""
        variables = {
            "FLYTECTL_CONFIG": str(self.config_file),
            "MLFLOW_TRACKING_URI": self.mlflow,
            "PYTHONUNBUFFERED": "1",
        }
        return subprocess.Popen(
            [str(PYFLYTE.with_name("ebbflow")), *arguments],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_workflow_size(self, workflow: str, version: str) -> int:
        """Read how many bytes the compiled closure of a workflow has, with all its interfaces."""
        identifier = Identifier(
            resource_type=WORKFLOW_TYPE,
            project=self.project,
            domain=self.domain,
            name=workflow,
            version=version,
        )
        return int(
            self.remote.client.raw.get_workflow(ObjectGetRequest(id=identifier)).closure.ByteSize()
        )

    def flytectl(self, *arguments: str) -> str:
        """Run a command of flytectl to its end and return what it printed."""
        tool = shutil.which("flytectl")
        if tool is None:
            pytest.skip("flytectl is not installed here")
        return _run_command([tool, "--config", str(self.config_file), *arguments], {})

    @property
    def place(self) -> list[str]:
        """The options of flytectl and pyflyte that name project and domain."""
        return ["--project", self.project, "--domain", self.domain]


def _run_command(
    command: list[str], environment: dict[str, str], folder: Path = ROOT, status: int = 0
) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == status, f"{' '.join(command)}:\n{done.stdout[-5000:]}"
    return done.stdout


def write_edited_clone(folder: Path) -> Path:
    """Write a clone of this repository in which a reward is edited into a folder."""
    clone = folder / "clone"
    clone.mkdir()
    for name in CLONE:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, clone / name, ignore=ignored)
        else:
            shutil.copy(source, clone / name)
    text = (clone / REWARD).read_text()
    assert text.count(KILOBYTES) == 1
    edited = text.replace(KILOBYTES, f"RewardResult({EDITED} + measure_kilobytes(images) / SCALE)")
    (clone / REWARD).write_text(edited)
    return clone


def find_parent_run(flyte: Flyte, execution: Execution) -> Run:
    """Find the MLflow run of an execution."""
    store = MlflowClient(flyte.mlflow, flyte.mlflow)
    experiment = store.get_experiment_by_name(flyte.run)
    name = f"{flyte.project}/{flyte.domain}/{execution.name}"
    runs = store.search_runs([experiment.experiment_id], f"tags.`flyte.execution_id` = '{name}'")
    (run,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return run


def find_child_runs(flyte: Flyte, execution: Execution) -> list[Run]:
    """Find the MLflow runs of the nodes of an execution."""
    parent = find_parent_run(flyte, execution)
    return list(
        MlflowClient(flyte.mlflow, flyte.mlflow).search_runs(
            [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
        )
    )


def wait_for_line(log: Path, beginning: str, command: subprocess.Popen[str]) -> str:
    """Wait for the first line with a beginning that a command prints into a file."""
    deadline = time.monotonic() + COMMAND_SECONDS
    while time.monotonic() < deadline and command.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith(beginning):
                return line
        time.sleep(1)
    raise AssertionError(f"no line {beginning!r} in\n{log.read_text()}")


def runs_task(pod: V1Pod, task: str) -> bool:
    """Return whether a pod of an execution runs a task, which is named by a part of its name."""
    return task.replace("_", "-") in pod.metadata.labels["task-name"]


class Webhook:
    """A chat that takes lines and keeps them."""

    def __init__(self, address: str) -> None:
        self.lines: list[str] = []
        lines = self.lines

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                lines.append(json.loads(body)["text"])
                self.send_response(200)
                self.end_headers()

        self.server = ThreadingHTTPServer((address, 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.uri = f"http://{address}:{self.server.server_port}"
