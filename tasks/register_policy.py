"""Register the candidate in the model registry, as challenger."""

from __future__ import annotations

from flytekit import current_context, task

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch
from tasks.resources import light
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light())
def register_policy(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    candidate: EvaluatedPolicy,
    champion: ChampionPolicy,
    decision: GateDecision,
) -> Registration:
    """Idempotent: one version per run."""
    from ebbflow.storage.artifacts import verify
    from ebbflow.tracking.child_run import node_run
    from ebbflow.tracking.registry import register

    execution = current_context().execution_id
    base_folder = fetch(base.folder)
    lineage = {
        "base_digest": verify(base_folder),
        "execution_id": execution.name if execution else "local",
        "candidate": candidate.evaluation.label,
        "policy_version": str(candidate.evaluation.policy_version),
    }
    with node_run(run, "registry") as run_logger:
        registration = register(
            run,
            fetch(candidate.policy.folder),
            base_folder,
            decision,
            lineage,
            model_name=recipe.promotion.model_name,
            expected_champion=champion.version,
        )
        run_logger.log_params(registration.model_dump())
    return registration
