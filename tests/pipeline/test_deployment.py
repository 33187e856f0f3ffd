"""The deployment file: what it may say, and what pods read of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tasks import resources
from tasks.deployment import (
    DeploymentConfig,
    DeploymentError,
    build_pod_environment,
    read_deployment,
)
from tasks.images import build_cpu_image
from tasks.pod_configs import TolerationConfig
from tests.pipeline.conftest import ROOT
from tests.pipeline.test_resources import KINDS

EXAMPLE = ROOT / "containers" / "deployment.example.yaml"
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))


def _read(folder: Path, text: str) -> DeploymentConfig:
    file = folder / "deployment.yaml"
    file.write_text(text)
    return read_deployment({"EBBFLOW_DEPLOYMENT": str(file)})


def test_without_a_file_everything_is_the_default() -> None:
    assert read_deployment({"PATH": "/bin"}) == DeploymentConfig()
    assert read_deployment({"EBBFLOW_TRAIN_PROCESSES": "3"}) == DeploymentConfig(train_processes=3)


def test_a_kind_keeps_the_defaults_that_a_file_does_not_name(tmp_path: Path) -> None:
    read = _read(tmp_path, "training_group: {mem: 9Gi}").training_group
    assert (read.mem, read.shared_memory, read.grace_period) == ("9Gi", "2Gi", 300)


def test_a_pod_reads_what_differs_from_the_defaults_back(tmp_path: Path) -> None:
    deployment = _read(
        tmp_path,
        "training_group: {shared_memory: null}\naccelerated: {image: 'a:1', grace_period: 30}",
    )
    assert read_deployment(build_pod_environment(deployment)) == deployment != DeploymentConfig()


@pytest.mark.parametrize(
    ("cpu", "requested"),
    [
        ("0.4", "0.4"),
        ("500m", "0.5"),
        ("'2'", "2"),
        ("2", "2"),
        ("1500m", "1.5"),
        ("0.001", "0.001"),
    ],
)
def test_cores_may_be_fractions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: str, requested: str
) -> None:
    deployment = _read(tmp_path, f"light: {{cpu: {cpu}}}")
    assert read_deployment(build_pod_environment(deployment)) == deployment
    monkeypatch.setattr(resources, "DEPLOYMENT", deployment)
    arguments = resources.light_resources()
    assert arguments["requests"].cpu == arguments["limits"].cpu == requested


def test_the_cores_of_a_training_group_are_those_of_its_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deployment = _read(tmp_path, "{train_processes: 3, training_group: {cpu: 0.4}}")
    monkeypatch.setattr(resources, "DEPLOYMENT", deployment)
    assert resources.training_group_resources()["requests"].cpu == "1.2"


def test_the_example_names_every_key_and_only_images_that_have_a_dockerfile() -> None:
    read = read_deployment({"EBBFLOW_DEPLOYMENT": str(EXAMPLE)})
    assert _keys(DeploymentConfig) == set(
        re.findall(r"^ *(?:- )?(\w+):", EXAMPLE.read_text(), re.MULTILINE)
    )
    images = {getattr(read, kind).image for kind in set(KINDS.values())} | {
        group.image for group in read.ray_cluster.workers
    }
    assert images - {None} == {f"ebbflow-{file.stem}:0.1.0" for file in DOCKERFILES}


@pytest.mark.parametrize("image", ["trainer", "rollout"])
def test_images_that_may_compile_a_model_have_a_compiler(image: str) -> None:
    """torch's inductor compiles C++, and Triton compiles its launchers in C."""
    text = (ROOT / "containers" / f"{image}.Dockerfile").read_text()
    (installed,) = re.findall(r"apt-get install ([^&]+)", text)
    assert {"g++", "gcc"} <= set(installed.split())


def _keys(model: type[BaseModel]) -> set[str]:
    """The names of all keys of a model and of the models in it."""
    schema = model.model_json_schema()
    return {key for part in (schema, *schema["$defs"].values()) for key in part["properties"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("light: {cpuu: 3}", ["light.cpuu: unknown key", "did you mean 'cpu'?"]),
        ("acelerated: {gpus: 1}", ["unknown key", "did you mean 'accelerated'?"]),
        ("light: {mem: 8}", ["light.mem = 8", "such as 512Mi, 8Gi"]),
        ("light: {mem: 8GB}", ["light.mem = '8GB'", "such as 512Mi, 8Gi"]),
        ("light: {mem: null}", ["light.mem = None", "such as 512Mi, 8Gi"]),
        ("scorer: {shared_memory: true}", ["scorer.shared_memory = True", "such as 512Mi, 8Gi"]),
        ("scorer: {cpu: 0}", ["scorer.cpu = 0", "at least 0.001"]),
        ("scorer: {cpu: 0.0005}", ["scorer.cpu = 0.0005", "whole thousandths"]),
        ("scorer: {cpu: 0.5m}", ["scorer.cpu = '0.5m'", "such as 2 or 0.5, or thousandths"]),
        ("scorer: {cpu: -1}", ["scorer.cpu = -1", "such as 2 or 0.5"]),
        ("scorer: {cpu: true}", ["scorer.cpu = True", "a valid number of cores", "0.4 and 500m"]),
        (
            "accelerated: {grace_period: -1}",
            ["accelerated.grace_period = -1", "greater than or equal to 0"],
        ),
        (
            "accelerated: {accelerator: nvidia-h100}",
            ["accelerated", "accelerator = 'nvidia-h100' needs gpus", "remove accelerator"],
        ),
        ("training_group: {gpus: 8}", ["training_group.gpus = 8", "less than or equal to 1"]),
        ("ray_cluster: {gpus: 8}", ["ray_cluster.gpus = 8", "less than or equal to 0"]),
        ("ray_cluster: {accelerator: nvidia-h100}", ["needs workers with gpus"]),
        (
            "ray_cluster: {workers: [{name: Two Words}]}",
            ["ray_cluster.workers.0.name = 'Two Words'"],
        ),
        (
            "ray_cluster: {ephemeral_storage: 9Gi}",
            ["workers: ephemeral_storage is left out", "head's 9Gi; state theirs"],
        ),
        ("secrets: [{group: a, key: b, variable: lower}]", ["secrets.0.variable", "match pattern"]),
        ("ray_cluster: {workers: []}", ["ray_cluster.workers", "at least 1"]),
        ("scorer: {interruptible: sometimes}", ["scorer.interruptible = 'sometimes'", "boolean"]),
        ("hub_secret: {group: hub}", ["hub_secret.key", "required"]),
        ("light: {retries: 1, retries: 2}", ["given twice: ['retries']"]),
        (
            "{train_processes: 6, train_context_parallel: 4}",
            ["4 does not divide train_processes = 6"],
        ),
        ("env: {FLYTE_INTERNAL_TASK_NAME: a}", ["Flyte sets FLYTE_INTERNAL_TASK_NAME itself"]),
        ("env: {MY_POD_IP: a}", ["Flyte sets MY_POD_IP itself"]),
        ("env: {EBBFLOW_DEPLOYMENT: a}", ["every pod has EBBFLOW_DEPLOYMENT by itself"]),
        ("env: {A B: a}", ["'A B' is no name of an environment variable"]),
        (
            "{hub_secret: {group: a, key: b}, env: {HF_TOKEN: c}}",
            ["HF_TOKEN is also the variable of a secret"],
        ),
        (
            "secrets: [{group: a, key: b, variable: X}, {group: c, key: d, variable: X}]",
            ["X is the variable of two secrets"],
        ),
        ("labels: {team: two words}", ["labels.team = 'two words'", "at most 63 letters"]),
        ("ray_cluster: {workers: [{}, {}]}", ["workers are called workers twice"]),
        ("- light", ["must be a mapping of keys, got list"]),
        ("light: [", ["not valid YAML"]),
    ],
)
def test_a_bad_file_says_what_is_wrong_with_it(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(DeploymentError) as error:
        _read(tmp_path, text)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert message.startswith(f"EBBFLOW_DEPLOYMENT={tmp_path}")


def test_a_missing_file_points_to_the_example() -> None:
    with pytest.raises(
        DeploymentError, match=r"EBBFLOW_DEPLOYMENT=not/there.yaml: there is no such file.*example"
    ):
        read_deployment({"EBBFLOW_DEPLOYMENT": "not/there.yaml"})


def test_the_environment_overrides_the_size_of_a_training_group(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("train_nodes: 4\ntrain_processes: 8\ntrain_sharding: hybrid")
    read = read_deployment({"EBBFLOW_DEPLOYMENT": str(file), "EBBFLOW_TRAIN_NODES": "2"})
    assert (read.train_nodes, read.train_processes, read.train_sharding) == (2, 8, "hybrid")


@pytest.mark.parametrize("number", ["two", "0"])
def test_a_bad_number_of_processes_names_its_variable(number: str) -> None:
    with pytest.raises(
        DeploymentError,
        match=rf"EBBFLOW_TRAIN_PROCESSES={number}:\ntrain_processes = '{number}': Input should be",
    ):
        read_deployment({"EBBFLOW_TRAIN_PROCESSES": number})


@pytest.mark.parametrize(
    ("given", "operator"),
    [({}, "Exists"), ({"key": "gpu"}, "Exists"), ({"key": "dedicated", "value": "gpu"}, "Equal")],
)
def test_a_toleration_with_a_value_compares_it(given: dict[str, str], operator: str) -> None:
    assert TolerationConfig.model_validate(given).operator == operator


@pytest.mark.parametrize(
    "given",
    [{"key": "gpu", "value": "a", "operator": "Exists"}, {"value": "a"}, {"operator": "Equal"}],
)
def test_a_toleration_that_kubernetes_refuses_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="takes no value|needs the key"):
        TolerationConfig.model_validate(given)


def test_the_image_registry_serves_the_kinds_without_an_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deployment = _read(tmp_path, "image_registry: localhost:30000\nscorer: {image: 'reward:1'}")
    monkeypatch.setattr(resources, "DEPLOYMENT", deployment)
    assert resources.scorer_resources()["container_image"] == "reward:1"
    assert (
        resources.light_resources()["container_image"].id == build_cpu_image("localhost:30000").id
    )
