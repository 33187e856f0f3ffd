"""Which task gets which image and how much of a machine, read from the packaged tasks."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin import task_pb2
from flyteidl.core import tasks_pb2
from flyteidl.core.security_pb2 import Secret as SecretProto
from google.protobuf.json_format import MessageToDict

from tasks import resources
from tasks.deployment import DeploymentConfig, read_deployment
from tests.forked import run_forked
from tests.pipeline.conftest import PYFLYTE, ROOT

EXAMPLE = ROOT / "containers" / "deployment.example.yaml"

KINDS = {
    "tasks.choose_candidate.choose_candidate": "light",
    "tasks.compute_advantages.compute_advantages": "light",
    "tasks.conclude_retraining.conclude_retraining": "light",
    "tasks.copy_base_model.copy_base_model": "downloader",
    "tasks.choose_specialist.choose_specialist": "scorer",
    "tasks.decide_promotion.decide_promotion": "light",
    "tasks.distill_branches.distill_branches": "accelerated",
    "tasks.distill_branches_colocated.distill_branches_colocated": "training_group",
    "tasks.distill_branches_ray.distill_branches_ray": "ray_cluster",
    "tasks.download_base_model.download_base_model": "downloader",
    "tasks.encode_data.encode_data": "accelerated",
    "tasks.end_failed_run.end_failed_run": "light",
    "tasks.evaluate_branch.evaluate_branch": "accelerated",
    "tasks.evaluate_champion.evaluate_champion": "accelerated",
    "tasks.evaluate_policy.evaluate_policy": "accelerated",
    "tasks.generate_rollouts.generate_rollouts": "accelerated",
    "tasks.import_data.import_data": "downloader",
    "tasks.import_pairs.import_pairs": "accelerated",
    "tasks.import_policy.import_policy": "downloader",
    "tasks.plan_retraining.plan_retraining": "light",
    "tasks.plan_run.plan_run": "light",
    "tasks.prepare_prompts.prepare_prompts": "light",
    "tasks.promote_policy.promote_policy": "light",
    "tasks.read_recipe.read_recipe": "light",
    "tasks.register_policy.register_policy": "light",
    "tasks.request_approval.request_approval": "light",
    "tasks.score_both_sides.score_both_sides": "scorer",
    "tasks.score_rollouts.score_rollouts": "scorer",
    "tasks.select_prompts.select_prompts": "light",
    "tasks.start_policy.start_policy": "light",
    "tasks.start_run.start_run": "light",
    "tasks.train_base_model.train_base_model": "accelerated",
    "tasks.train_offline.train_offline": "training_group",
    "tasks.train_custom.train_custom": "accelerated",
    "tasks.train_reward_model.train_reward_model": "accelerated",
    "tasks.train_online.train_online": "accelerated",
    "tasks.train_online_colocated.train_online_colocated": "training_group",
    "tasks.train_online_ray.train_online_ray": "ray_cluster",
    "tasks.watch_approval.watch_approval": "light",
    "tasks.write_report.write_report": "light",
    "workflows.post_training.conclude": "light",
    "workflows.post_training.prepare_base_model": "light",
    "workflows.post_training.prepare_policy": "light",
    "workflows.post_training.train_branch": "light",
    "workflows.post_training.train_rounds": "light",
    "workflows.retraining.train_if_changed": "light",
    "workflows.flywheel.train_and_collect": "light",
    "tasks.collect_bad_cases.collect_bad_cases": "accelerated",
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
    "downloader": (
        NOTHING_SPECIAL
        | {"resources": {"cpu": "2", "memory": "16Gi", "ephemeral-storage": "100Gi"}}
    ),
    "scorer": NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "4Gi"}},
    "accelerated": (
        NOTHING_SPECIAL | {"resources": {"cpu": "2", "memory": "8Gi"}, "grace_period": 300}
    ),
    "training_group": (
        NOTHING_SPECIAL
        | {
            "resources": {"cpu": "2", "memory": "8Gi"},
            "shared_memory": "2Gi",
            "grace_period": 300,
        }
    ),
    "ray_cluster": (
        NOTHING_SPECIAL
        | {
            "resources": {"cpu": "2", "memory": "8Gi"},
            "shared_memory": "4Gi",
            "grace_period": 300,
        }
    ),
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
  max_hours: 48
  workers:
    - {name: gpus, replicas: 2, cpu: 30, mem: 400Gi, ephemeral_storage: 90Gi, gpus: 8,
       node_selector: {pool: gpus}}
    - {name: rewards, image: "reward:1", cpu: 7, mem: 20Gi}
"""
EVERYWHERE = [
    ("mlflow", "password", "MLFLOW_TRACKING_PASSWORD"),
    ("judge", "token", "JUDGE_TOKEN_FILE"),
]
"""Secrets that every task gets."""
ON_GPUS = {
    "light": (
        NOTHING_SPECIAL
        | {
            "resources": {"cpu": "3", "memory": "5Gi", "ephemeral-storage": "7Gi"},
            "grace_period": 31,
            "retries": 0,
            "secrets": EVERYWHERE,
        }
    ),
    "downloader": (
        NOTHING_SPECIAL
        | {
            "image": "base:4",
            "resources": {"cpu": "7", "memory": "17Gi", "ephemeral-storage": "300Gi"},
            "secrets": [*EVERYWHERE, ("hub", "token", "HF_TOKEN")],
        }
    ),
    "scorer": (
        NOTHING_SPECIAL
        | {
            "image": "reward:1",
            "resources": {"cpu": "6", "memory": "24Gi"},
            "grace_period": 45,
            "interruptible": True,
            "retries": 5,
            "secrets": EVERYWHERE,
        }
    ),
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
OPERATED = dict.fromkeys(
    ["tasks.train_online_ray.train_online_ray", "tasks.distill_branches_ray.distill_branches_ray"],
    "ray",
)
"""Tasks whose pods an operator of its own makes."""

Tasks = dict[str, tasks_pb2.TaskTemplate]


def _package(folder: Path, variables: dict[str, str]) -> Tasks:
    """Every task that ``pyflyte package`` writes with these variables set."""
    output = folder / "flyte.tgz"
    command = [
        str(PYFLYTE),
        "--pkgs",
        "workflows",
        "package",
        "--image",
        "ebbflow:test",
        "--source",
        ".",
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("EBBFLOW_")
    } | variables
    done = run_forked(
        [*command, "--output", str(output), "-f"], cwd=ROOT, env=environment, timeout=300
    )
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
    # Flyte refuses shared memory beside a volume at its place.
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/code"]
    assert template.type == OPERATED.get(template.id.name, "python-task"), (
        "an operator of its own would build another pod"
    )
    return {
        "image": container["image"],
        "resources": container["resources"]["requests"],
        "accelerator": template.extended_resources.gpu_accelerator.device,
        "shared_memory": template.extended_resources.shared_memory.size_limit,
        "grace_period": pod["terminationGracePeriodSeconds"],
        "interruptible": template.metadata.interruptible,
        "retries": template.metadata.retries.retries,
        "secrets": [
            (secret.group, secret.key, secret.env_var)
            for secret in template.security_context.secrets
        ],
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
    # The dynamics compile their tasks in their pods: what they do not know there, the tasks do not
    # get.
    assert read_deployment(_environment(by_default[name])) == DeploymentConfig()
    read = read_deployment(_environment(for_gpus[name]))
    assert read == read_deployment(gpu_variables)
    assert (read.train_processes, read.training_group.image, read.accelerated.gpus) == (
        4,
        "trainer:3",
        1,
    )


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
    files = {
        secret.env_var: secret.mount_requirement for secret in template.security_context.secrets
    }
    assert files["JUDGE_TOKEN_FILE"] == SecretProto.FILE
    assert files["MLFLOW_TRACKING_PASSWORD"] == SecretProto.ENV_VAR


def test_a_pod_knows_the_gpus_that_it_asks_for(by_default: Tasks, for_gpus: Tasks) -> None:
    """Its processes refuse to train on the CPU instead (``ebbflow.compute``)."""
    named = {
        name: _environment(template).get("EBBFLOW_GPUS") for name, template in for_gpus.items()
    }
    assert named == {name: ON_GPUS[kind]["resources"].get("gpu") for name, kind in KINDS.items()}, (
        "what the pod requests"
    )
    assert not any("EBBFLOW_GPUS" in _environment(task) for task in by_default.values())


def test_where_a_pod_may_run_and_for_how_long(for_gpus: Tasks) -> None:
    template = for_gpus["tasks.train_online.train_online"]
    pod, _ = _pod(template)
    assert pod["nodeSelector"] == {"pool": "gpus"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert pod["affinity"] == {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}
    }
    assert pod["activeDeadlineSeconds"] == 5400
    assert template.metadata.timeout.ToSeconds() == 0, "Flyte's timeout counts waiting, too"
    light = for_gpus["tasks.start_run.start_run"]
    assert not {"nodeSelector", "tolerations", "affinity", "activeDeadlineSeconds"} & set(
        _pod(light)[0]
    )


def test_pods_of_an_operator_have_the_timeout_of_flyte_instead_of_a_deadline(
    for_gpus: Tasks,
) -> None:
    template = for_gpus["tasks.train_online_ray.train_online_ray"]
    assert template.metadata.timeout.ToSeconds() == 3600 * 48
    assert "activeDeadlineSeconds" not in _pod(template)[0]


def test_no_two_tasks_share_a_pod_template() -> None:
    # Flyte writes into some of them.
    kinds = (getattr(resources, f"{kind}_resources") for kind in set(KINDS.values()))
    templates = [kind()["pod_template"] for kind in kinds for _ in range(2)]
    assert (
        len({id(template) for template in templates})
        == len({id(template.pod_spec) for template in templates})
        == 12
    )


def _ray_groups(
    template: tasks_pb2.TaskTemplate, service_account: str | None = None
) -> dict[str, dict[str, Any]]:
    """What each group of Ray workers asks for beside what the cluster's pods have in common."""
    cluster = MessageToDict(template.custom)["rayCluster"]
    head = cluster["headGroupSpec"]
    assert head.pop("rayStartParams") == {"num-cpus": "0"}, (
        "no actor on the head, which is the task's pod"
    )
    # Flyte's plugin overwrites the one of the task's pod.
    assert head.get("k8sPod", {}).get("podSpec", {}).get("serviceAccountName") == service_account
    groups = {}
    for group in cluster["workerGroupSpec"]:
        pod = group["k8sPod"]["podSpec"]
        (container,) = pod["containers"]
        assert pod.get("serviceAccountName") == service_account
        assert container.pop("name") == "ray-worker", "Flyte merges by this name"
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        assert container["resources"]["requests"] == container["resources"].pop("limits")
        groups[group["groupName"]] = {
            "replicas": group["replicas"],
            **container.pop("resources")["requests"],
            **container,
        }
        groups[group["groupName"]] |= {
            key: pod[key] for key in ("nodeSelector", "tolerations") if key in pod
        }
    return groups


def test_the_workers_of_a_ray_cluster(by_default: Tasks, for_gpus: Tasks) -> None:
    name = "tasks.train_online_ray.train_online_ray"
    assert _ray_groups(by_default[name]) == {
        "workers": {"replicas": 1, "cpu": "4", "memory": "16Gi"}
    }
    gpus = {"cpu": "30", "memory": "400Gi", "ephemeral-storage": "90Gi", "nvidia.com/gpu": "8"} | {
        "nodeSelector": {"pool": "gpus", "gpu/kind": "nvidia-h100"},
        "tolerations": [{"key": "gpu/kind", "operator": "Equal", "value": "nvidia-h100"}],
    }
    rewards = {"cpu": "7", "memory": "20Gi", "image": "reward:1"}
    assert _ray_groups(for_gpus[name], "trainer") == {
        "gpus": {"replicas": 2, **gpus},
        "rewards": {"replicas": 1, **rewards},
    }
    assert MessageToDict(for_gpus[name].custom)["shutdownAfterJobFinishes"], (
        "else its GPUs stay taken"
    )
    # 0, which protobuf leaves out: the next task may wait for its machines.
    assert "ttlSecondsAfterFinished" not in MessageToDict(for_gpus[name].custom)
