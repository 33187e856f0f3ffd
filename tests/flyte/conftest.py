"""A Flyte, what it runs on, and what is registered there: nothing here runs without one (``make
test-flyte``).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from flyte_cases import (
    Flyte,
    ListPods,
    MakeRecipe,
    Record,
    Register,
    runs_task,
    write_edited_clone,
)
from flyte_engine import Execution
from flyte_table import write_table
from flytekit.configuration import Config
from flytekit.remote import FlyteRemote
from kubernetes import client, config
from kubernetes.client import CoreV1Api, V1Pod

from ebbflow.recipe import Recipe, load_recipe
from tests.forked import ROOT

FLYTE = "EBBFLOW_FLYTE"
IMAGE = "EBBFLOW_FLYTE_IMAGE"
MLFLOW = "EBBFLOW_FLYTE_MLFLOW"
OUTPUT = "EBBFLOW_FLYTE_OUTPUT"
STARTED = pytest.StashKey[float]()
"""When the command began."""
REQUIRED = (FLYTE, IMAGE, MLFLOW, OUTPUT)
PROJECT = "EBBFLOW_FLYTE_PROJECT"
DOMAIN = "EBBFLOW_FLYTE_DOMAIN"
DEPLOYMENT = "EBBFLOW_FLYTE_DEPLOYMENT"
TABLE = "EBBFLOW_FLYTE_TABLE"
SMALL_DEPLOYMENT: dict[str, Any] = {
    "labels": {"team": "post-training"},
    "light": {"cpu": "100m", "mem": "1Gi"},
    "downloader": {"cpu": "100m", "mem": "3Gi"},
    "scorer": {"cpu": "100m", "mem": "2Gi"},
    "accelerated": {"cpu": "200m", "mem": "3Gi", "shared_memory": "192Mi", "grace_period": 120},
    "training_group": {
        "cpu": "100m",
        "mem": "4Gi",
        "shared_memory": "256Mi",
        "grace_period": 120,
    },
    "ray_cluster": {
        "cpu": "200m",
        "mem": "3Gi",
        "shared_memory": "512Mi",
        "workers": [{"name": "workers", "cpu": "500m", "mem": "4Gi"}],
    },
}
"""Fits a node of two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Record the docstring of each test, which is the name of its case in the table, also where a
    fixture fails.
    """
    for item in items:
        docstring = getattr(item, "function", None).__doc__
        if docstring:
            item.user_properties.append(("case", " ".join(docstring.split())))


@pytest.fixture(scope="session")
def flyte(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flyte]:
    """The Flyte of ``FLYTE``; what still runs there at the end is aborted."""
    if missing := [name for name in REQUIRED if not os.environ.get(name)]:
        pytest.skip(
            f"{' and '.join(missing)} not set: `make test-flyte` runs the pipeline on Flyte"
            " (docs/flyte.md)"
        )
    config_file = _find_config_file(os.environ[FLYTE], tmp_path_factory.mktemp("flyte"))
    project = os.environ.get(PROJECT) or "flytesnacks"
    domain = os.environ.get(DOMAIN) or "development"
    engine = Flyte(
        FlyteRemote(Config.auto(str(config_file)), project, domain),
        config_file,
        project,
        domain,
        os.environ[IMAGE],
        os.environ[MLFLOW],
        os.environ[OUTPUT].rstrip("/"),
        f"ebbflow-{uuid4().hex[:6]}",
    )
    yield engine
    for execution in engine.started:
        if execution.read_phase() in ("QUEUED", "RUNNING"):
            execution.abort("the tests have ended")


@pytest.fixture(scope="session")
def flyte_version(flyte: Flyte) -> str:
    """The version that the Flyte names; one that was built by hand may know none."""
    name = str(flyte.remote.client.get_control_plane_version())
    return "built without a version" if name == "unknown" else name


@pytest.fixture(autouse=True)
def record_version(flyte_version: str, record_property: Record) -> None:
    """Record the version with each case: a table of some of the cases has it, too."""
    record_property("version of Flyte", flyte_version)


def _find_config_file(flyte: str, folder: Path) -> Path:
    """Find the file with which pyflyte and flytectl reach Flyte; of a host and port it is written,
    for a Flyte without TLS.
    """
    if Path(flyte).is_file():
        return Path(flyte)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"admin": {"endpoint": f"dns:///{flyte}", "insecure": True}}))
    return path


@pytest.fixture(scope="session")
def pods(flyte: Flyte) -> CoreV1Api:
    """The pods of the executions, through ``KUBECONFIG``."""
    try:
        config.load_kube_config()
    except config.ConfigException as error:
        pytest.skip(f"no cluster to look at pods in: KUBECONFIG: {error}")
    return client.CoreV1Api()


@pytest.fixture(scope="session")
def list_pods(flyte: Flyte, pods: CoreV1Api) -> ListPods:
    """``list_pods(execution, task)``: the pods of a task of an execution."""

    def listed(execution: Execution, task: str) -> list[V1Pod]:
        namespace = f"{flyte.project}-{flyte.domain}"
        selector = f"execution-id={execution.name}"
        found: list[V1Pod] = pods.list_namespaced_pod(namespace, label_selector=selector).items
        return [pod for pod in found if runs_task(pod, task)]

    return listed


@pytest.fixture(scope="session")
def deployment() -> dict[str, Any]:
    """The deployment file that the Flyte is registered with; by default a small one."""
    path = os.environ.get(DEPLOYMENT)
    settings = yaml.safe_load(Path(path).read_text()) if path else dict(SMALL_DEPLOYMENT)
    environment = {"MLFLOW_TRACKING_URI": os.environ.get(MLFLOW, "")}
    return settings | {"env": environment | settings.get("env", {})}


@pytest.fixture(scope="session")
def plan_recipe(flyte: Flyte, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of the launch plans: on a cluster its output has to be a URI."""
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text())
    settings |= {"output": f"{flyte.output}/{flyte.run}", "tracking": {"experiment": flyte.run}}
    path = tmp_path_factory.mktemp("plans") / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="session")
def register(flyte: Flyte, deployment: dict[str, Any], plan_recipe: Path) -> Register:
    """``register(**changes)``: the version under which pyflyte has registered the workflows with a
    deployment."""

    def registered(**changes: Any) -> str:
        text = json.dumps(deployment | changes)
        version = f"{flyte.run}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        options = ["--image", flyte.image, *flyte.place, "--version", version, "--copy", "none"]
        variables = {"EBBFLOW_DEPLOYMENT": text, "EBBFLOW_RECIPE": str(plan_recipe)}
        flyte.pyflyte("register", *options, "workflows", **variables)
        return version

    return registered


@pytest.fixture(scope="session")
def version(register: Register) -> str:
    """The version of most executions."""
    return register()


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this repository in which a reward is edited."""
    return write_edited_clone(tmp_path_factory.mktemp("edited"))


@pytest.fixture(scope="session")
def make_recipe(flyte: Flyte, tmp_path_factory: pytest.TempPathFactory) -> MakeRecipe:
    """``make_recipe(**changes)``: ``tiny`` with other keys; experiment and model have the name of
    this run of the tests.
    """

    def made(name: str, **changes: Any) -> Recipe:
        settings = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text())
        settings |= {"output": f"{flyte.output}/{flyte.run}"} | changes
        settings["tracking"] = {"experiment": flyte.run}
        settings["promotion"] = {"model_name": f"{flyte.run}-{name}"} | settings["promotion"]
        path = tmp_path_factory.mktemp(name) / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings))
        return load_recipe(path)

    return made


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = os.environ.get(TABLE)
    # Not in a worker of xdist, which knows of its own tests alone.
    if path and not hasattr(config, "workerinput"):
        seconds = time.monotonic() - config.stash[STARTED]
        write_table(Path(path), terminalreporter.stats, seconds)
