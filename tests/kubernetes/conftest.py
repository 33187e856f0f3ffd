"""A Kubernetes cluster, and servers that its pods reach: nothing here runs without them (``make
test-kubernetes``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from kubernetes import client, config
from kubernetes_cases import ADDRESS, DELETED_AT, IMAGE, Kubernetes

from tests.pipeline.conftest import package
from tests.pipeline.pods import Package, decoded
from tests.pipeline.servers import object_store

DEPLOYMENT = {
    "labels": {"team": "post-training"},
    "light": {"cpu": 1, "mem": "2Gi"},
    "scorer": {"cpu": 1, "mem": "2Gi"},
    "accelerated": {"cpu": 1, "mem": "3Gi", "shared_memory": "192Mi", "grace_period": 120},
    "training_group": {"cpu": 1, "mem": "4Gi", "shared_memory": "256Mi", "grace_period": 120},
}
"""Numbers that no task has by default."""


@pytest.fixture(scope="session")
def image() -> str:
    if missing := [name for name in (IMAGE, ADDRESS) if name not in os.environ]:
        pytest.skip(
            f"{' and '.join(missing)} not set: `make test-kubernetes` runs the pipeline as pods"
            " (containers/README.md)"
        )
    return os.environ[IMAGE]


@pytest.fixture(scope="session")
def address(image: str) -> str:
    """Of this machine, as pods reach it."""
    return os.environ[ADDRESS]


@pytest.fixture(scope="session")
def kubernetes(image: str) -> Iterator[Kubernetes]:
    """The cluster and the namespace of the current context of ``KUBECONFIG``."""
    config.load_kube_config()
    _, context = config.list_kube_config_contexts()
    namespace = context["context"].get("namespace", "default")
    run = f"ebbflow-{uuid4().hex[:6]}"
    found = Kubernetes(client.CoreV1Api(), namespace, run, DELETED_AT)
    yield found
    found.delete_all()


@pytest.fixture(scope="session")
def packaged(image: str, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return decoded(package(tmp_path_factory.mktemp("package"), image, json.dumps(DEPLOYMENT)))


@pytest.fixture(scope="session")
def store(address: str) -> Iterator[dict[str, str]]:
    with object_store(address) as variables:
        yield variables
