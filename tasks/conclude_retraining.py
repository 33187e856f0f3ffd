"""Record what a night was trained from, so that the next one knows whether anything has changed."""

from __future__ import annotations

import logging

from flytekit import task

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from tasks.resources import light_resources

logger = logging.getLogger(__name__)


@task(**light_resources())
def conclude_retraining(
    run: TrackedRun, decision: GateDecision, registration: Registration, inputs_digest: str
) -> str:
    """Tag the run with the digest of its inputs, and return the outcome of the night in words."""
    from ebbflow.tracking.parent_run import tag_retraining

    tag_retraining(run, inputs_digest)
    if registration.champion:
        verdict = "is champion"
    elif registration.declined:
        verdict = "stays challenger: not approved"
    else:
        verdict = f"stays challenger: {' '.join(decision.reasons)}"
    outcome = (
        f"{registration.model_name} version {registration.version} {verdict}"
        f" ({run.folder}/report.html)"
    )
    logger.info("%s", outcome)
    return outcome
