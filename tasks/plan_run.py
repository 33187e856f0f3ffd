"""What a run would need, so that nobody has to find out on a cluster."""

from __future__ import annotations

from flytekit import task

from ebbflow.recipe import Recipe
from tasks.deployment import DeploymentConfig, DeploymentError, PodConfig
from tasks.resources import DEPLOYMENT, light_resources

KINDS = {
    "light": "bookkeeping",
    "downloader": "download of the base model",
    "scorer": "rewards of offline stages",
    "accelerated": "text encoding, rollouts, online training, evaluations",
    "training_group": "offline training",
    "ray_cluster": "head of online stages with placement: ray",
}


@task(**light_resources())
def plan_run(recipe: Recipe) -> str:
    """The resolved recipe, the deployment's machines, the estimate, and what fits where; nothing is
    run or downloaded.

    Raises:
        DeploymentError: a task of the recipe does not fit into its machine. Only where a deployment
            is given: without one it says so, as a local run has the whole machine.
        ModelError: processes cannot share the tokens of its samples.
    """
    import yaml

    from ebbflow.estimate.run import estimate_recipe
    from ebbflow.estimate.text import describe_estimate
    from ebbflow.models.sizes import check_shared_tokens
    from tasks.fit import compare_needs

    resolved = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    keys = ("train_processes", "train_nodes", "train_sharding", "train_context_parallel")
    given = {key: getattr(DEPLOYMENT, key) for key in keys}
    hybrid = DEPLOYMENT.train_sharding == "hybrid"
    context_parallel = DEPLOYMENT.train_context_parallel
    check_shared_tokens(recipe, context_parallel)
    made = estimate_recipe(
        recipe, DEPLOYMENT.train_processes, DEPLOYMENT.train_nodes, hybrid, context_parallel
    )
    lines, misfits = compare_needs(made, DEPLOYMENT)
    if misfits and DeploymentConfig(**given) != DEPLOYMENT:
        raise DeploymentError("this run does not fit into its machines:\n" + "\n".join(misfits))
    fit = "\n".join(["what each process needs, of its machine's memory", *lines, *misfits])
    return (
        f"{resolved}# digest"
        f" {recipe.digest}\n\n{_list_machines()}\n\n{describe_estimate(made)}\n\n{fit}"
    )


def _list_machines() -> str:
    lines = ["machines per kind of task, as registered"]
    for kind, purpose in KINDS.items():
        pod: PodConfig = getattr(DEPLOYMENT, kind)
        spread = (DEPLOYMENT.train_processes, DEPLOYMENT.train_nodes)
        processes, nodes = spread if kind == "training_group" else (1, 1)
        gpus = f"{pod.gpus * processes} x {pod.accelerator or 'GPU'}" if pod.gpus else "no GPU"
        purpose += f", {nodes} nodes" if nodes > 1 else ""
        lines.append(
            f"  {kind} ({purpose}): processes {processes}, cores {pod.cpu * processes}, {pod.mem},"
            f" {gpus}"
        )
    for group in DEPLOYMENT.ray_cluster.workers:
        gpus = (
            f"{group.gpus} x {DEPLOYMENT.ray_cluster.accelerator or 'GPU'}"
            if group.gpus
            else "no GPU"
        )
        lines.append(
            f"  ray_cluster, {group.replicas} x {group.name} (actors): cores {group.cpu},"
            f" {group.mem}, {gpus}"
        )
    return "\n".join(lines)
