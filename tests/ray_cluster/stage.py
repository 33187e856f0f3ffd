"""An execution of an online stage on the cluster: its inputs, the packaged command of its task, and
what an attempt leaves.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from fsspec import AbstractFileSystem
from google.protobuf.json_format import MessageToDict

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.types import BaseModelArtifact, TrainedPolicy
from tests.pipeline.pods import Package
from tests.ray_cluster.machines import Machines

BUCKET = "s3://flyte"
MAX_SECONDS = 1500
"""Of an attempt, which may wait 300 s for a machine that does not come back."""


@dataclass(frozen=True)
class Ended:
    """What an attempt printed, and its error or its policy.

    Attributes:
        commit: the checksum over all files of the policy folder.
        tensors: that of its parameters.
        replaced: workers that died and were replaced.
    """

    log: str
    error: ContainerError | None = None
    commit: bytes = b""
    tensors: str = ""
    replaced: float = 0


@dataclass(frozen=True)
class Stage:
    """An execution of the first stage of a recipe.

    Args:
        name: of the execution.
        inputs: URI of the folder with the base model, the untrained policy and the prompts.
    """

    name: str
    recipe: Recipe
    run: TrackedRun
    inputs: str
    package: Package
    store: AbstractFileSystem
    machines: Machines

    def submit(self, attempt: int, log: Path) -> subprocess.Popen[bytes]:
        """The stage as a job of Ray, under way."""
        return self.machines.submit(self.command("train_online_ray", attempt), log)

    def command(self, task: str, attempt: int) -> list[str]:
        """What the container of the task runs."""
        inputs = f"{BUCKET}/metadata/{self.name}/inputs.pb"
        self.store.pipe_file(inputs, LiteralMap(literals=self._literals()).SerializeToString())
        raw = f"{BUCKET}/raw/{self.name}/{attempt}"
        filled = {
            "{{.input}}": inputs,
            "{{.outputPrefix}}": self._outputs(attempt),
            "{{.rawOutputDataPrefix}}": raw,
        }
        filled |= {
            "{{.checkpointOutputPrefix}}": f"{raw}/_flyte",
            "{{.prevCheckpointPrefix}}": '""',
        }
        return [
            filled.get(argument, argument) for argument in container(self.package, task)["args"]
        ]

    def wait_for_checkpoint(self, step: int, job: subprocess.Popen[bytes]) -> None:
        """Until the checkpoint before a step is in the store."""
        while not self._exists(f"{self.run.folder}/checkpoints/1.1-online/step-{step:05}/COMMIT"):
            assert job.poll() is None, f"it ended before step {step}"
            time.sleep(0.2)

    def ended(self, job: subprocess.Popen[bytes], attempt: int, log: Path) -> Ended:
        """Wait for the end of an attempt."""
        job.wait(MAX_SECONDS)
        said = log.read_text()
        prefix = self._outputs(attempt)
        if self._exists(f"{prefix}/error.pb"):
            return Ended(
                said, ErrorDocument.FromString(self.store.cat_file(f"{prefix}/error.pb")).error
            )
        assert self._exists(f"{prefix}/outputs.pb"), said[-5000:]
        output = LiteralMap.FromString(self.store.cat_file(f"{prefix}/outputs.pb")).literals["o0"]
        policy = msgpack.unpackb(output.scalar.binary.value)
        metrics = json.loads(self.store.cat_file(policy["metrics"]["path"]))
        folder = policy["folder"]["path"]
        tensors = self.store.cat_file(f"{folder}/transformer/diffusion_pytorch_model.safetensors")
        replaced = metrics[-1]["workers/replaced"]
        return Ended(
            said,
            None,
            self.store.cat_file(f"{folder}/COMMIT"),
            hashlib.sha256(tensors).hexdigest(),
            replaced,
        )

    def _literals(self) -> dict[str, Literal]:
        values: dict[str, Any] = {
            "recipe": self.recipe,
            "run": self.run,
            "base": BaseModelArtifact(
                folder=FlyteDirectory(f"{self.inputs}/base"), seconds=0, finished_at=0
            ),
            "policy": TrainedPolicy(folder=FlyteDirectory(f"{self.inputs}/policy")),
            "prompts": FlyteFile(f"{self.inputs}/prompts.parquet"),
            "round": 0,
            "stage": 0,
        }
        return {name: _literal(value) for name, value in values.items()}

    def _outputs(self, attempt: int) -> str:
        return f"{BUCKET}/metadata/{self.name}/{attempt}"

    def _exists(self, uri: str) -> bool:
        self.store.invalidate_cache()
        return bool(self.store.exists(uri))


def container(package: Package, task: str) -> dict[str, Any]:
    """The container in which a task runs, as Flyte gets it."""
    (found,) = MessageToDict(package.tasks[f"tasks.{task}.{task}"].k8s_pod.pod_spec)["containers"]
    return dict(found)


def _literal(value: Any) -> Literal:
    kind = type(value)
    context = FlyteContextManager.current_context()
    return TypeEngine.to_literal(
        context, value, kind, TypeEngine.to_literal_type(kind)
    ).to_flyte_idl()
