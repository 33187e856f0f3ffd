"""The two servers that pods share: an object store, and MLflow's."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from ebbflow.tracking.store import _ensure_sqlite
from ebbflow.tracking.ui import SERVER_SETTINGS
from tests.pipeline.conftest import PYFLYTE

KEY = "pod"
"""Name and password of everybody."""


@contextmanager
def object_store(address: str = "127.0.0.1") -> Iterator[dict[str, str]]:
    """An S3 server, as the variables that lead a pod there."""
    server = ThreadedMotoServer(address, 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        keys = {"FLYTE_AWS_ACCESS_KEY_ID": KEY, "FLYTE_AWS_SECRET_ACCESS_KEY": KEY}
        yield {
            "FLYTE_AWS_ENDPOINT": f"http://{host}:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            **keys,
        }
    finally:
        server.stop()


def client_of(store: Mapping[str, str]) -> S3FileSystem:
    """A client of an object store that sees what pods write behind its back."""
    return S3FileSystem(
        key=KEY, secret=KEY, endpoint_url=store["FLYTE_AWS_ENDPOINT"], use_listings_cache=False
    )


@contextmanager
def tracking_server(
    folder: Path,
    address: str = "127.0.0.1",
    database: str | None = None,
    artifacts: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The URI of an MLflow server, which alone gets at its database and artifacts.

    Args:
        folder: of its log, and of its database and artifacts where none are given.
        database, artifacts: URIs.
        environment: further variables, such as those that lead to its artifacts.
    """
    with socket.socket() as free:
        free.bind((address, 0))
        port = str(free.getsockname()[1])
    uri = f"http://{address}:{port}"
    listening = [
        "--host",
        address,
        "--port",
        port,
        "--allowed-hosts",
        f"{address}:{port}",
        "--workers",
        "1",
    ]
    if database is None:
        database = f"sqlite:///{folder}/mlflow.db"
        # A copy of an empty store: the server would make its tables in hundreds of statements.
        _ensure_sqlite(folder / "mlflow.db", database)
    places = ["--backend-store-uri", database]
    places += ["--artifacts-destination", artifacts or str(folder / "artifacts")]
    command = [str(PYFLYTE.with_name("mlflow")), "server", *listening, *places]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | SERVER_SETTINGS | (environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while not _answers(uri):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield uri
    finally:
        server.terminate()
        server.wait()


def _answers(uri: str) -> bool:
    try:
        return urlopen(f"{uri}/health", timeout=5).status == 200
    except OSError:
        return False
