"""Which task gets which image and how much of a machine, read from the packaged tasks; the deployment file; the images."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin import task_pb2
from flyteidl.core import tasks_pb2
from flyteidl.core.security_pb2 import Secret as SecretProto
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.python_auto_container import update_image_spec_copy_handling
from flytekit.image_spec.default_builder import create_docker_context
from google.protobuf.json_format import MessageToDict
from packaging.requirements import Requirement
from pydantic import BaseModel

from tasks import resources
from tasks.deployment import DeploymentConfig, DeploymentError, TolerationConfig, pod_environment, read_deployment
from tasks.images import cpu_image
from tests.forked import run_forked
from tests.pipeline.conftest import PYFLYTE, ROOT

EXAMPLE = ROOT / "containers" / "deployment.example.yaml"
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))

# --- the packaged tasks

KINDS = {
    "tasks.choose_candidate.choose_candidate": "light",
    "tasks.compute_advantages.compute_advantages": "light",
    "tasks.copy_base_model.copy_base_model": "downloader",
    "tasks.decide_promotion.decide_promotion": "light",
    "tasks.download_base_model.download_base_model": "downloader",
    "tasks.evaluate_champion.evaluate_champion": "accelerated",
    "tasks.evaluate_policy.evaluate_policy": "accelerated",
    "tasks.generate_rollouts.generate_rollouts": "accelerated",
    "tasks.import_pairs.import_pairs": "accelerated",
    "tasks.import_policy.import_policy": "downloader",
    "tasks.plan_run.plan_run": "light",
    "tasks.prepare_prompts.prepare_prompts": "light",
    "tasks.promote_policy.promote_policy": "light",
    "tasks.register_policy.register_policy": "light",
    "tasks.request_approval.request_approval": "light",
    "tasks.score_rollouts.score_rollouts": "scorer",
    "tasks.start_policy.start_policy": "light",
    "tasks.start_run.start_run": "light",
    "tasks.train_base_model.train_base_model": "accelerated",
    "tasks.train_offline.train_offline": "training_group",
    "tasks.train_custom.train_custom": "accelerated",
    "tasks.train_online.train_online": "accelerated",
    "tasks.train_online_ray.train_online_ray": "ray_cluster",
    "tasks.write_report.write_report": "light",
    "workflows.post_training.conclude": "light",
    "workflows.post_training.prepare_base_model": "light",
    "workflows.post_training.prepare_policy": "light",
    "workflows.post_training.train_rounds": "light",
}

NOTHING_SPECIAL: dict[str, Any] = {
    "image": "ebbflow:test",
    "accelerator": "",
    "shared_memory": "",
    "grace_period": 30,
    "interruptible": False,
    "retries": 2,
    "secrets": [],
}
ON_CPUS = {
    "light": NOTHING_SPECIAL | {"resources": {"cpu": "1", "memory": "2Gi"}},
    "downloader": NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "16Gi", "ephemeral-storage": "100Gi"}},
    "scorer": NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "4Gi"}},
    "accelerated": NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "8Gi"}, "grace_period": 300},
    "training_group": NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "8Gi"}, "shared_memory": "2Gi", "grace_period": 300},
    "ray_cluster": NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "8Gi"}, "shared_memory": "4Gi", "grace_period": 300},
}

GPU_CLUSTER = """
train_processes: 8
hub_secret: {group: hub, key: token}
secrets:
  - {group: mlflow, key: password, variable: MLFLOW_TRACKING_PASSWORD}
  - {group: judge, key: token, variable: JUDGE_TOKEN_FILE, file: true}
env: {HTTPS_PROXY: "http://proxy:3128"}
labels: {team: post-training}
service_account: trainer
image_pull_secrets: [registry]
priority_class: low
accelerator_label: gpu/kind
notifications: {email: [team@example.com], phases: [FAILED]}
light: {cpu: 3, mem: 5Gi, ephemeral_storage: 7Gi, grace_period: 31, retries: 0}
downloader: {image: "base:4", cpu: 7, mem: 17Gi, ephemeral_storage: 300Gi}
scorer: {image: "reward:1", cpu: 6, mem: 24Gi, grace_period: 45, interruptible: true, retries: 5}
accelerated:
  image: rollout:2
  cpu: 12
  mem: 96Gi
  ephemeral_storage: 200Gi
  gpus: 1
  accelerator: nvidia-l40s
  shared_memory: 16Gi
  grace_period: 240
  retries: 3
  max_hours: 1.5
  node_selector: {pool: gpus}
  tolerations: [{key: nvidia.com/gpu, effect: NoSchedule}]
  affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: []}}
training_group:
  image: trainer:3
  cpu: 5
  mem: 512Gi
  gpus: 1
  accelerator: nvidia-h100
  shared_memory: 64Gi
  grace_period: 600
  interruptible: true
  retries: 4
ray_cluster:
  image: rollout:2
  cpu: 3
  mem: 6Gi
  accelerator: nvidia-h100
  shared_memory: 32Gi
  grace_period: 500
  interruptible: true
  retries: 6
  workers:
    - {name: gpus, replicas: 2, cpu: 30, mem: 400Gi, ephemeral_storage: 90Gi, gpus: 8, node_selector: {pool: gpus}}
    - {name: rewards, image: "reward:1", cpu: 7, mem: 20Gi}
"""
EVERYWHERE = [("mlflow", "password", "MLFLOW_TRACKING_PASSWORD"), ("judge", "token", "JUDGE_TOKEN_FILE")]
"""Secrets that every task gets."""
ON_GPUS = {
    "light": NOTHING_SPECIAL
    | {
        "resources": {"cpu": "3", "memory": "5Gi", "ephemeral-storage": "7Gi"},
        "grace_period": 31,
        "retries": 0,
        "secrets": EVERYWHERE,
    },
    "downloader": NOTHING_SPECIAL
    | {
        "image": "base:4",
        "resources": {"cpu": "7", "memory": "17Gi", "ephemeral-storage": "300Gi"},
        "secrets": [*EVERYWHERE, ("hub", "token", "HF_TOKEN")],
    },
    "scorer": NOTHING_SPECIAL
    | {
        "image": "reward:1",
        "resources": {"cpu": "6", "memory": "24Gi"},
        "grace_period": 45,
        "interruptible": True,
        "retries": 5,
        "secrets": EVERYWHERE,
    },
    "accelerated": {
        "image": "rollout:2",
        "resources": {"cpu": "12", "memory": "96Gi", "ephemeral-storage": "200Gi", "gpu": "1"},
        "accelerator": "nvidia-l40s",
        "shared_memory": "16Gi",
        "grace_period": 240,
        "interruptible": False,
        "retries": 3,
        "secrets": EVERYWHERE,
    },
    # Four processes, not the file's eight: EBBFLOW_TRAIN_PROCESSES was set when packaging.
    "training_group": {
        "image": "trainer:3",
        "resources": {"cpu": "20", "memory": "512Gi", "gpu": "4"},
        "accelerator": "nvidia-h100",
        "shared_memory": "64Gi",
        "grace_period": 600,
        "interruptible": True,
        "retries": 4,
        "secrets": EVERYWHERE,
    },
    "ray_cluster": {
        "image": "rollout:2",
        "resources": {"cpu": "3", "memory": "6Gi"},
        "accelerator": "nvidia-h100",
        "shared_memory": "32Gi",
        "grace_period": 500,
        "interruptible": True,
        "retries": 6,
        "secrets": EVERYWHERE,
    },
}
OPERATED = {"tasks.train_online_ray.train_online_ray": "ray"}
"""Tasks whose pods an operator of its own makes."""

Tasks = dict[str, tasks_pb2.TaskTemplate]


def _package(folder: Path, variables: dict[str, str]) -> Tasks:
    """Every task that ``pyflyte package`` writes with these variables set."""
    output = folder / "flyte.tgz"
    command = [str(PYFLYTE), "--pkgs", "workflows", "package", "--image", "ebbflow:test", "--source", "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EBBFLOW_")} | variables
    done = run_forked([*command, "--output", str(output), "-f"], cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(output) as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith("_1.pb")]
        templates = [task_pb2.TaskSpec.FromString(file.read()).template for file in files if file]
    return {template.id.name: template for template in templates}


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return _package(tmp_path_factory.mktemp("default"), {})


@pytest.fixture(scope="module")
def gpu_variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is set when registering for the GPU cluster."""
    file = tmp_path_factory.mktemp("deployment") / "gpus.yaml"
    file.write_text(GPU_CLUSTER)
    return {"EBBFLOW_DEPLOYMENT": str(file), "EBBFLOW_TRAIN_PROCESSES": "4"}


@pytest.fixture(scope="module")
def for_gpus(tmp_path_factory: pytest.TempPathFactory, gpu_variables: dict[str, str]) -> Tasks:
    return _package(tmp_path_factory.mktemp("gpus"), gpu_variables)


def _pod(template: tasks_pb2.TaskTemplate) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its one container, which is the one that Flyte fills in."""
    pod = MessageToDict(template.k8s_pod.pod_spec)
    (container,) = pod["containers"]
    assert container["name"] == template.config["primary_container_name"]
    return pod, container


def _asked(template: tasks_pb2.TaskTemplate) -> dict[str, Any]:
    """What a task asks of the cluster, as the cluster reads it."""
    pod, container = _pod(template)
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert "volumes" not in pod, "Flyte refuses shared memory beside a volume at its place"
    assert template.type == OPERATED.get(template.id.name, "python-task"), "an operator of its own would build another pod"
    return {
        "image": container["image"],
        "resources": container["resources"]["requests"],
        "accelerator": template.extended_resources.gpu_accelerator.device,
        "shared_memory": template.extended_resources.shared_memory.size_limit,
        "grace_period": pod["terminationGracePeriodSeconds"],
        "interruptible": template.metadata.interruptible,
        "retries": template.metadata.retries.retries,
        "secrets": [(secret.group, secret.key, secret.env_var) for secret in template.security_context.secrets],
    }


def _environment(template: tasks_pb2.TaskTemplate) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in _pod(template)[1]["env"]}


def test_every_task_has_a_kind(by_default: Tasks, for_gpus: Tasks) -> None:
    assert set(by_default) == set(for_gpus) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_task_gets_by_default(by_default: Tasks, name: str) -> None:
    assert _asked(by_default[name]) == ON_CPUS[KINDS[name]]


@pytest.mark.parametrize("name", KINDS)
def test_what_a_task_gets_from_a_deployment_file(for_gpus: Tasks, name: str) -> None:
    assert _asked(for_gpus[name]) == ON_GPUS[KINDS[name]]


@pytest.mark.parametrize("name", KINDS)
def test_every_pod_reads_the_deployment_that_was_registered(
    by_default: Tasks, for_gpus: Tasks, gpu_variables: dict[str, str], name: str
) -> None:
    # The dynamics compile their tasks in their pods: what they do not know there, the tasks do not get.
    assert read_deployment(_environment(by_default[name])) == DeploymentConfig()
    read = read_deployment(_environment(for_gpus[name]))
    assert read == read_deployment(gpu_variables)
    assert (read.train_processes, read.training_group.image, read.accelerated.gpus) == (4, "trainer:3", 1)


@pytest.mark.parametrize("name", KINDS)
def test_what_every_pod_of_a_deployment_has(for_gpus: Tasks, name: str) -> None:
    template = for_gpus[name]
    pod, _ = _pod(template)
    assert (pod["serviceAccountName"], pod["imagePullSecrets"], pod["priorityClassName"]) == (
        "trainer",
        [{"name": "registry"}],
        "low",
    )
    assert dict(template.k8s_pod.metadata.labels) == {"team": "post-training"}
    assert _environment(template)["HTTPS_PROXY"] == "http://proxy:3128"
    files = {secret.env_var: secret.mount_requirement for secret in template.security_context.secrets}
    assert files["JUDGE_TOKEN_FILE"] == SecretProto.FILE
    assert files["MLFLOW_TRACKING_PASSWORD"] == SecretProto.ENV_VAR


def test_where_a_pod_may_run_and_for_how_long(for_gpus: Tasks) -> None:
    template = for_gpus["tasks.train_online.train_online"]
    pod, _ = _pod(template)
    assert pod["nodeSelector"] == {"pool": "gpus"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["affinity"] == {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert template.metadata.timeout.ToSeconds() == 5400
    light = for_gpus["tasks.start_run.start_run"]
    assert not {"nodeSelector", "tolerations", "affinity"} & set(_pod(light)[0])
    assert light.metadata.timeout.ToSeconds() == 0


def test_no_two_tasks_share_a_pod_template() -> None:
    # Flyte writes into some of them.
    kinds = (getattr(resources, kind) for kind in set(KINDS.values()))
    templates = [kind()["pod_template"] for kind in kinds for _ in range(2)]
    assert len({id(template) for template in templates}) == len({id(template.pod_spec) for template in templates}) == 12


def _ray_groups(template: tasks_pb2.TaskTemplate) -> dict[str, dict[str, Any]]:
    """What each group of Ray workers asks for beside what the cluster's pods have in common."""
    cluster = MessageToDict(template.custom)["rayCluster"]
    assert cluster["headGroupSpec"] == {"rayStartParams": {"num-cpus": "0"}}, "no actor on the head, which is the task's pod"
    groups = {}
    for group in cluster["workerGroupSpec"]:
        pod = group["k8sPod"]["podSpec"]
        (container,) = pod["containers"]
        assert container.pop("name") == "ray-worker", "Flyte merges by this name"
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        assert container["resources"]["requests"] == container["resources"].pop("limits")
        groups[group["groupName"]] = {"replicas": group["replicas"], **container.pop("resources")["requests"], **container}
        groups[group["groupName"]] |= {key: pod[key] for key in ("nodeSelector", "tolerations") if key in pod}
    return groups


def test_the_workers_of_a_ray_cluster(by_default: Tasks, for_gpus: Tasks) -> None:
    name = "tasks.train_online_ray.train_online_ray"
    assert _ray_groups(by_default[name]) == {"workers": {"replicas": 1, "cpu": "4", "memory": "16Gi"}}
    gpus = {"cpu": "30", "memory": "400Gi", "ephemeral-storage": "90Gi", "nvidia.com/gpu": "8"} | {
        "nodeSelector": {"pool": "gpus", "gpu/kind": "nvidia-h100"},
        "tolerations": [{"key": "gpu/kind", "operator": "Equal", "value": "nvidia-h100"}],
    }
    rewards = {"cpu": "7", "memory": "20Gi", "image": "reward:1"}
    assert _ray_groups(for_gpus[name]) == {"gpus": {"replicas": 2, **gpus}, "rewards": {"replicas": 1, **rewards}}
    assert MessageToDict(for_gpus[name].custom)["shutdownAfterJobFinishes"], "else its GPUs stay taken"
    assert MessageToDict(for_gpus[name].custom)["ttlSecondsAfterFinished"] == 300, "its logs can be read"


# --- the deployment file


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
    deployment = _read(tmp_path, "training_group: {shared_memory: null}\naccelerated: {image: 'a:1', grace_period: 30}")
    assert read_deployment(pod_environment(deployment)) == deployment != DeploymentConfig()


def test_the_example_names_every_key_and_only_images_that_have_a_dockerfile() -> None:
    read = read_deployment({"EBBFLOW_DEPLOYMENT": str(EXAMPLE)})
    assert _keys(DeploymentConfig) == set(re.findall(r"^ *(?:- )?(\w+):", EXAMPLE.read_text(), re.MULTILINE))
    images = {getattr(read, kind).image for kind in set(KINDS.values())} | {group.image for group in read.ray_cluster.workers}
    assert images - {None} == {f"ebbflow-{file.stem}:0.1.0" for file in DOCKERFILES}


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
        ("scorer: {cpu: 0}", ["scorer.cpu = 0", "greater than or equal to 1"]),
        ("accelerated: {grace_period: -1}", ["accelerated.grace_period = -1", "greater than or equal to 0"]),
        (
            "accelerated: {accelerator: nvidia-h100}",
            ["accelerated", "accelerator = 'nvidia-h100' needs gpus", "remove accelerator"],
        ),
        ("training_group: {gpus: 8}", ["training_group.gpus = 8", "less than or equal to 1"]),
        ("ray_cluster: {gpus: 8}", ["ray_cluster.gpus = 8", "less than or equal to 0"]),
        ("ray_cluster: {accelerator: nvidia-h100}", ["needs workers with gpus"]),
        ("ray_cluster: {workers: [{name: Two Words}]}", ["ray_cluster.workers.0.name = 'Two Words'"]),
        ("ray_cluster: {ephemeral_storage: 9Gi}", ["workers: ephemeral_storage is left out", "head's 9Gi; state theirs"]),
        ("secrets: [{group: a, key: b, variable: lower}]", ["secrets.0.variable", "match pattern"]),
        ("ray_cluster: {workers: []}", ["ray_cluster.workers", "at least 1"]),
        ("scorer: {interruptible: sometimes}", ["scorer.interruptible = 'sometimes'", "boolean"]),
        ("hub_secret: {group: hub}", ["hub_secret.key", "required"]),
        ("light: {retries: 1, retries: 2}", ["given twice: ['retries']"]),
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
    with pytest.raises(DeploymentError, match=r"EBBFLOW_DEPLOYMENT=not/there.yaml: there is no such file.*example"):
        read_deployment({"EBBFLOW_DEPLOYMENT": "not/there.yaml"})


def test_the_environment_overrides_the_size_of_a_training_group(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("train_nodes: 4\ntrain_processes: 8\ntrain_sharding: hybrid")
    read = read_deployment({"EBBFLOW_DEPLOYMENT": str(file), "EBBFLOW_TRAIN_NODES": "2"})
    assert (read.train_nodes, read.train_processes, read.train_sharding) == (2, 8, "hybrid")


@pytest.mark.parametrize("number", ["two", "0"])
def test_a_bad_number_of_processes_names_its_variable(number: str) -> None:
    with pytest.raises(
        DeploymentError, match=rf"EBBFLOW_TRAIN_PROCESSES={number}:\ntrain_processes = '{number}': Input should be"
    ):
        read_deployment({"EBBFLOW_TRAIN_PROCESSES": number})


# --- the images


def _instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of it) of a Dockerfile, with its lines joined, its comments dropped and its arguments at their
    defaults."""
    text = "\n".join(line for line in file.read_text().splitlines() if line and not line.startswith("#"))
    for name, value in re.findall(r'^ARG (\w+)="(.*)"$', text, re.MULTILINE):
        text = text.replace(f"${name}", value)
    joined = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined)]


def _copied(file: Path) -> dict[str, Path]:
    """Where in the image each copied file lies, and where it comes from."""
    pairs: dict[str, Path] = {}
    for name, rest in _instructions(file):
        if name == "COPY":
            *sources, target = rest.split()
            pairs |= {
                str(Path(target, Path(source).name) if target.endswith("/") else target): Path(source) for source in sources
            }
    return pairs


def _pip() -> argparse.ArgumentParser:
    """``pip install`` as the Dockerfiles may use it; any other option is an error."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--requirement", "--requirements", dest="requirements")
    for option in ("--constraints", "--build-constraints", "--editable", "--python", "--torch-backend"):
        parser.add_argument(option)
    for flag in ("--system", "--no-cache", "--no-cache-dir", "--no-deps"):
        parser.add_argument(flag, action="store_true")
    return parser


def _installs(run: str) -> list[argparse.Namespace]:
    """The ``pip install`` commands in a RUN."""
    commands = [shlex.split(command) for command in run.split("&&")]
    tails = [command[command.index("pip") + 1 :] for command in commands if "pip" in command]
    return [_pip().parse_args(tail[1:]) for tail in tails if tail[0] == "install"]


def _pins(file: Path) -> dict[str, str]:
    """Package and version of every line, each of which must be a pin."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9._-]+==[\w.+]+", line) for line in lines), f"{file.name} has a line that is no pin"
    return dict(line.split("==") for line in lines)


def _wanted(install: argparse.Namespace, copied: dict[str, Path]) -> list[str]:
    """The requirements that an install names itself or through a file."""
    if install.requirements is None:
        return install.packages
    file = ROOT / copied[install.requirements]
    if file.name == "pyproject.toml":
        return tomllib.loads(file.read_text())["project"]["dependencies"]
    return file.read_text().split()


def test_there_are_the_four_images() -> None:
    assert [file.stem for file in DOCKERFILES] == ["base", "reward", "rollout", "trainer"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_what_a_dockerfile_copies_exists(file: Path) -> None:
    sources = _copied(file).values()
    assert {"datasets", "ebbflow", "tasks", "workflows", "pyproject.toml"} <= {str(source) for source in sources}
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_images_stand_on_one_exact_tag() -> None:
    stands_on = {rest for file in DOCKERFILES for name, rest in _instructions(file) if name == "FROM"}
    assert stands_on == {cpu_image("localhost:1").base_image}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", stands_on.pop())


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_everything_that_is_installed_is_pinned(file: Path) -> None:
    copied = _copied(file)
    installs = [install for name, rest in _instructions(file) if name == "RUN" for install in _installs(rest)]
    assert len(installs) >= 3
    for install in installs:
        pins = _pins(ROOT / copied[install.constraints]) if install.constraints else {}
        for requirement in map(Requirement, _wanted(install, copied)):
            assert str(requirement.specifier).startswith("==") or requirement.name in pins, requirement
        if install.editable:
            assert install.no_deps
            assert "setuptools" in _pins(ROOT / copied[install.build_constraints])


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_an_image_runs_as_any_user_and_writes_into_tmp_alone(file: Path) -> None:
    instructions = _instructions(file)
    (user,) = (rest for name, rest in instructions if name == "USER")
    assert user == "1000"
    assert ("WORKDIR", "/opt/ebbflow") in instructions
    assert "/root" not in file.read_text()
    (variables,) = (rest.split() for name, rest in instructions if name == "ENV" and "HOME" in rest)
    assert {"HOME=/tmp", "PYTHONPATH=/opt/ebbflow"} <= set(variables)


@pytest.mark.parametrize(
    ("given", "operator"), [({}, "Exists"), ({"key": "gpu"}, "Exists"), ({"key": "dedicated", "value": "gpu"}, "Equal")]
)
def test_a_toleration_with_a_value_compares_it(given: dict[str, str], operator: str) -> None:
    assert TolerationConfig.model_validate(given).operator == operator


@pytest.mark.parametrize("given", [{"key": "gpu", "value": "a", "operator": "Exists"}, {"value": "a"}, {"operator": "Equal"}])
def test_a_toleration_that_kubernetes_refuses_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="takes no value|needs the key"):
        TolerationConfig.model_validate(given)


@pytest.mark.parametrize("image", ["base", "reward", "rollout"])
def test_the_images_of_ray_pods_have_what_its_operator_probes_them_with(image: str) -> None:
    (install,) = (
        rest for name, rest in _instructions(ROOT / "containers" / f"{image}.Dockerfile") if name == "RUN" and "apt-get" in rest
    )
    assert " wget " in install


def test_the_builder_gets_what_the_dockerfiles_copy_and_nothing_else() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == {source.parts[0] for file in DOCKERFILES for source in _copied(file).values()}


def test_the_engine_is_the_one_that_goes_with_its_vllm() -> None:
    pins = _pins(ROOT / "containers" / "vllm-omni.txt")
    assert pins["vllm"] == pins["vllm-omni"]


def test_flyte_builds_the_cpu_image_from_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    create_docker_context(cpu_image("localhost:30000"), tmp_path)
    written = (tmp_path / "Dockerfile").read_text()
    base = "\n".join(" ".join(instruction) for instruction in _instructions(ROOT / "containers" / "base.Dockerfile"))
    copied = _copied(ROOT / "containers" / "base.Dockerfile")
    assert all((tmp_path / path).exists() for path in copied if not path.startswith("containers/"))
    assert (tmp_path / "ebbflow" / "datasets" / "signs" / "prompts.txt").is_file()
    assert (ROOT / "containers" / "uv.txt").read_text().strip() in (tmp_path / "requirements_uv.txt").read_text()
    assert all(" --torch-backend cpu --constraints constraints.txt " in text for text in (written, base))
    assert all("tesseract-ocr" in text and "wget" in text and "MLFLOW_DISABLE_TELEMETRY=true" in text for text in (written, base))


def test_a_pod_knows_the_cpu_image_that_was_built_when_registering() -> None:
    registered = cpu_image("localhost:30000")
    settings = SerializationSettings(ImageConfig.auto(img_name="ebbflow:test"), source_root="/somewhere/else")
    update_image_spec_copy_handling(registered, settings)
    assert registered.id == cpu_image("localhost:30000").id != cpu_image("localhost:30001").id


def test_the_image_registry_serves_the_kinds_without_an_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deployment = _read(tmp_path, "image_registry: localhost:30000\nscorer: {image: 'reward:1'}")
    monkeypatch.setattr(resources, "DEPLOYMENT", deployment)
    assert resources.scorer()["container_image"] == "reward:1"
    assert resources.light()["container_image"].id == cpu_image("localhost:30000").id
