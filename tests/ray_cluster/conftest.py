"""A Ray cluster of three containers: nothing here runs without podman or docker (``make
test-ray-cluster``).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from moto.server import ThreadedMotoServer

from ebbflow.tracking.ui import SERVER_SETTINGS
from tests.containers.conftest import TOOL, build_base_image
from tests.pipeline.conftest import package
from tests.pipeline.pods import Package, decoded
from tests.ray_cluster.machines import GATEWAY, Machines
from tests.ray_cluster.stage import container


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The workflows as Flyte gets them."""
    if TOOL not in os.environ:
        pytest.skip(
            f"{TOOL} is not set: `make test-ray-cluster` starts Ray on three containers with podman"
            " or docker, and kills some"
        )
    return decoded(package(tmp_path_factory.mktemp("package")))


@pytest.fixture(scope="session")
def machines(packaged: Package, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Machines that reach an S3 server and an MLflow server, both on this one, and nothing else."""
    ports = _free_ports(2)
    task = container(packaged, "train_online_ray")
    environment = {variable["name"]: variable["value"] for variable in task.get("env", ())} | {
        "FLYTE_AWS_ENDPOINT": f"http://{GATEWAY}:{ports[0]}",
        "FLYTE_AWS_ACCESS_KEY_ID": "pod",
        "FLYTE_AWS_SECRET_ACCESS_KEY": "pod",
        "AWS_DEFAULT_REGION": "us-east-1",
        "MLFLOW_TRACKING_URI": f"http://{GATEWAY}:{ports[1]}",
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_INTERNAL_EXECUTION_ID": "f0",
    }
    machines = Machines(os.environ[TOOL], build_base_image("ebbflow-base:ray-cluster"), environment)
    with (
        machines.network(),
        _s3_server(ports[0]),
        _mlflow_server(ports[1], tmp_path_factory.mktemp("mlflow")),
    ):
        yield machines


def _free_ports(count: int) -> list[int]:
    """Before there is a gateway to listen on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


@contextmanager
def _s3_server(port: int) -> Iterator[None]:
    server = ThreadedMotoServer(GATEWAY, port, verbose=False)
    server.start()
    yield
    server.stop()


@contextmanager
def _mlflow_server(port: int, folder: Path) -> Iterator[None]:
    stores = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    options = ["--host", GATEWAY, "--port", str(port), "--workers", "1", *stores]
    with (folder / "log").open("w") as log:
        command = [str(Path(sys.executable).with_name("mlflow")), "server", *options]
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | SERVER_SETTINGS,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while not _answers(f"http://{GATEWAY}:{port}/health"):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield
    finally:
        server.terminate()
        server.wait()


def _answers(uri: str) -> bool:
    try:
        return urlopen(uri, timeout=5).status == 200
    except OSError:
        return False
