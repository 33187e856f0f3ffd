"""Register the candidate in the model registry, as challenger."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flytekit import current_context, task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import describe_flyte, fetch_artifact
from tasks.resources import light_resources
from tasks.sources import CODE
from tasks.types import BaseModelArtifact, ChampionPolicy, EvaluatedPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def register_policy(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    candidate: EvaluatedPolicy,
    champion: ChampionPolicy,
    decision: GateDecision,
) -> Registration:
    """Register one version per run, with what the gate decided from; a retry finds that version."""
    from ebbflow.registry.promotion import register_version, require_evaluated_policy
    from ebbflow.storage.artifacts import verify_folder
    from ebbflow.storage.disk import raise_if_disk_full
    from ebbflow.storage.identity import list_code
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.verification.evidence import GateInputs, write_evidence

    execution = current_context().execution_id
    base_folder = fetch_artifact(base.folder)
    lineage = {
        "base_digest": verify_folder(base_folder),
        "execution_id": execution.name if execution else "local",
        "candidate": candidate.evaluation.label,
        "policy_version": str(candidate.evaluation.policy_version),
        **describe_flyte(),
    }
    sides = {"candidate": candidate, "champion": champion.evaluated}
    inputs = GateInputs(
        recipe=recipe,
        decision=decision,
        evaluations={side: evaluated.evaluation for side, evaluated in sides.items()},
        samples={side: fetch_artifact(evaluated.samples) for side, evaluated in sides.items()},
        anchor=fetch_artifact(champion.anchor.evaluated.samples) if champion.anchor else None,
        prompts=fetch_artifact(prompts),
        code=list_code(*CODE),
    )
    # The evidence is uploaded with the version, so that ``ebbflow verify`` can decide again.
    with open_node_run(run, "registry") as run_logger, tempfile.TemporaryDirectory() as folder:
        evidence = Path(folder) / "evidence"
        with raise_if_disk_full(evidence):
            lineage |= write_evidence(evidence, inputs)
        policy = fetch_artifact(candidate.policy.folder)
        require_evaluated_policy(policy, candidate.evaluation)
        registration = register_version(
            run,
            policy,
            base_folder,
            decision,
            lineage,
            model_name=recipe.promotion.model_name,
            expected_champion=champion.version,
            evidence=evidence,
        )
        run_logger.log_params(registration.model_dump())
    return registration
