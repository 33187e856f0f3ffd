"""What the nodes of a run occupy: GPUs and cores, as the deployment gives them to their tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbflow.recipe import Recipe
from tasks.deployment import DeploymentConfig
from tasks.pod_configs import PodConfig

if TYPE_CHECKING:  # its room imports matplotlib
    from ebbflow.report.costs import Machines, Prices

PARTS = {
    " rollout ": "accelerated",
    " pairs": "accelerated",
    " latents": "accelerated",
    " data": "downloader",
    " scoring ": "scorer",
}
"""Other tasks of a stage by what their nodes have in their names."""


def find_machines(deployment: DeploymentConfig, recipe: Recipe, node: str) -> Machines:
    """Return what a node occupies while it runs."""
    from ebbflow.report.costs import Machines

    kind = find_task_kind(recipe, node)
    if kind == "training_group":
        group = deployment.training_group
        processes = deployment.train_processes * deployment.train_nodes
        return Machines(group.gpus * processes, group.cpu * processes)
    # The head runs as long as its workers, without a GPU.
    if kind == "ray_cluster":
        cluster = deployment.ray_cluster
        gpus = sum(group.gpus * group.replicas for group in cluster.workers)
        cores = sum(group.cpu * group.replicas for group in cluster.workers)
        return Machines(gpus, cores + cluster.cpu)
    pod: PodConfig = getattr(deployment, kind)
    return Machines(pod.gpus, pod.cpu)


def find_task_kind(recipe: Recipe, node: str) -> str:
    """Find the kind of pods of the task that a node runs, as ``DeploymentConfig`` calls it."""
    if node.endswith(" evaluation"):
        return "accelerated"
    if node == "base model":
        return "accelerated" if recipe.model.path is None else "downloader"
    # The gate scores both sides together; that of a branch does so itself ("1 letters gate").
    if node == "gate scores" or node.endswith(" gate"):
        return "scorer"
    for round_number in range(recipe.rounds):
        for index, stage in enumerate(recipe.stages):
            label = recipe.stage_label(round_number, index)
            if node != label and not node.startswith(f"{label} "):
                continue
            # Shards run on machines of their own, and not on those of the training.
            for text, kind in PARTS.items():
                if text in node.removeprefix(label):
                    return kind
            if node != label:
                return "light"
            if stage.kind == "custom":
                return "accelerated"
            if stage.kind == "offline":
                return "training_group"
            return {
                "in_process": "accelerated",
                "colocated": "training_group",
                "ray": "ray_cluster",
            }[stage.placement]
    return "light"


def read_prices(deployment: DeploymentConfig) -> Prices:
    """Return the prices of the deployment."""
    from ebbflow.report.costs import Prices

    prices = deployment.prices
    return Prices(prices.gpu_hour, prices.core_hour, prices.currency)
