"""Make a registered policy champion, once the gate and, if the recipe asks for one, a person have
approved it.
"""

from __future__ import annotations

from flytekit import current_context, task

from ebbflow.data.records import Registration, TrackedRun
from tasks.cache import ONCE_PER_RUN
from tasks.resources import light_resources
from tasks.types import ChampionPolicy


@task(cache=ONCE_PER_RUN, **light_resources())
def promote_policy(
    run: TrackedRun, champion: ChampionPolicy, registration: Registration, approved: str = ""
) -> Registration:
    """Idempotent: the champion moves once. ``approved`` is the question that a person approved, if
    one was asked.
    """
    from ebbflow.registry.promotion import promote_version
    from ebbflow.tracking.child_run import open_node_run

    execution = current_context().execution_id
    name = execution.name if execution else "local"
    tags = {"promoted_in": name} | ({"approved_in": name, "approved": approved} if approved else {})
    with open_node_run(run, "promotion") as run_logger:
        promoted = promote_version(run, registration, tags, expected_champion=champion.version)
        run_logger.log_params(promoted.model_dump())
    return promoted
