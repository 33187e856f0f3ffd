"""Make a registered policy champion, once the gate and, if the recipe asks for one, a person have
approved it; or record that the person did not.
"""

from __future__ import annotations

from datetime import UTC, datetime

from flytekit import current_context, task

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.resources import light_resources
from tasks.types import ChampionPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def promote_policy(
    recipe: Recipe,
    run: TrackedRun,
    champion: ChampionPolicy,
    decision: GateDecision,
    registration: Registration,
    question: str = "",
    answer: bool = True,
) -> Registration:
    """Promote the version unless a person said no; a retry does not move the champion again.

    ``question`` is what the person was asked, empty if nobody was, and ``answer`` what they said. A
    no is a decision and not a failure: the version is tagged and stays challenger, and the run
    ends.
    """
    from ebbflow.evaluation.pinned_policy import build_measured_policy
    from ebbflow.registry.promotion import decline_version, promote_version
    from ebbflow.tracking.child_run import open_node_run

    execution = current_context().execution_id
    name = execution.name if execution else "local"
    # In the registry, as Flyte's record of an approval goes with the execution.
    tags = {"promoted_in": name}
    if question:
        # Candidates are compared with the last version that a person approved, too.
        anchored = datetime.now(UTC).isoformat()
        tags |= {"approved_in": name, "approved": question, "anchored": anchored}
    with open_node_run(run, "promotion") as run_logger:
        if not answer:
            declined = decline_version(
                run, registration, {"declined_in": name, "declined": question}
            )
            run_logger.log_params(declined.model_dump())
            return declined
        # The gate compared with ``expected_champion``. An alias has no compare-and-swap: it is read
        # again right before it moves, and another champion since then fails the promotion.
        promoted = promote_version(
            run,
            registration,
            tags,
            expected_champion=champion.version,
            gate_policy=build_measured_policy(recipe, decision),
        )
        run_logger.log_params(promoted.model_dump())
    return promoted
