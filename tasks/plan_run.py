"""The plan of a run: what it would need, so that nobody has to find out on a cluster."""

from __future__ import annotations

from flytekit import task

from ebbflow.recipe import Recipe
from tasks.deployment import DeploymentConfig, DeploymentError
from tasks.pod_configs import PodConfig, format_cores
from tasks.resources import DEPLOYMENT, light_resources

# Kinds of pods, the keys of a deployment, and what runs in them.
KINDS = {
    "light": "bookkeeping",
    "downloader": "download of the base model",
    "scorer": "rewards of offline stages",
    "accelerated": "text encoding, rollouts, online stages in one process, evaluations",
    "training_group": "offline training, online stages with placement: colocated",
    "ray_cluster": "head of online stages with placement: ray",
}


@task(**light_resources())
def plan_run(recipe: Recipe) -> str:
    """Describe the resolved recipe, the deployment's machines, the estimate, and what fits where;
    nothing is run or downloaded.

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
    context_parallel = DEPLOYMENT.train_context_parallel
    check_shared_tokens(recipe, context_parallel)
    estimate = estimate_recipe(
        recipe,
        DEPLOYMENT.train_processes,
        DEPLOYMENT.train_nodes,
        DEPLOYMENT.train_sharding,
        context_parallel,
    )
    lines, misfits = compare_needs(estimate, DEPLOYMENT)
    # A deployment that differs from the default in the training group alone has no machines of its
    # own: it is a local run with more processes, on a machine that nobody has described.
    keys = ("train_processes", "train_nodes", "train_sharding", "train_context_parallel")
    training_group = {key: getattr(DEPLOYMENT, key) for key in keys}
    if misfits and DeploymentConfig(**training_group) != DEPLOYMENT:
        raise DeploymentError("this run does not fit into its machines:\n" + "\n".join(misfits))
    fit = "\n".join(["what each process needs, of its machine's memory", *lines, *misfits])
    recipe_text = f"{resolved}# digest {recipe.digest}"
    return "\n\n".join([recipe_text, _list_machines(), describe_estimate(estimate), fit])


def _list_machines() -> str:
    """List the pods of each kind of task."""
    lines = ["machines per kind of task, as registered"]
    for kind, purpose in KINDS.items():
        pod: PodConfig = getattr(DEPLOYMENT, kind)
        is_group = kind == "training_group"
        processes = DEPLOYMENT.train_processes if is_group else 1
        nodes = DEPLOYMENT.train_nodes if is_group else 1
        gpus = f"{pod.gpus * processes} x {pod.accelerator or 'GPU'}" if pod.gpus else "no GPU"
        purpose += f", {nodes} nodes" if nodes > 1 else ""
        lines.append(
            f"  {kind} ({purpose}): processes {processes},"
            f" cores {format_cores(pod.cpu * processes)}, {pod.mem}, {gpus}"
        )
    for group in DEPLOYMENT.ray_cluster.workers:
        kind = DEPLOYMENT.ray_cluster.accelerator or "GPU"
        gpus = f"{group.gpus} x {kind}" if group.gpus else "no GPU"
        lines.append(
            f"  ray_cluster, {group.replicas} x {group.name} (actors):"
            f" cores {format_cores(group.cpu)}, {group.mem}, {gpus}"
        )
    return "\n".join(lines)
