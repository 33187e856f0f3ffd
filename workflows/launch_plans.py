"""Launch plans: start the pipeline on a schedule or by hand. With the default recipe, both ask a
person before promoting.

``EBBFLOW_RECIPE`` names that recipe when you register; default: recipes/glyph.yaml.
"""

from __future__ import annotations

import os
from pathlib import Path

from flytekit import CronSchedule, Email, LaunchPlan, Slack
from flytekit.core.notification import Notification
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.models.security import Identity, SecurityContext

from ebbflow.recipe import Recipe, load_recipe
from tasks.resources import DEPLOYMENT
from workflows.post_training import post_train

APPROVAL_HOURS = 72.0
"""For a recipe without ``promotion.approval``: enough for a weekend."""


def _read_recipe_with_approval() -> Recipe:
    """Read the recipe, always with approval by a person: nobody watches a run at night."""
    default = Path(__file__).parent / "recipes" / "glyph.yaml"
    recipe = load_recipe(os.environ.get("EBBFLOW_RECIPE") or default)
    promotion = recipe.promotion.model_copy(
        update={"approval": recipe.promotion.approval or APPROVAL_HOURS}
    )
    return recipe.model_copy(update={"promotion": promotion})


def _build_notifications() -> list[Notification]:
    """Build the notifications of those who hear of the end of a run, by the deployment."""
    config = DEPLOYMENT.notifications
    phases = [getattr(WorkflowExecutionPhase, phase) for phase in config.phases]
    kinds = ((Email, config.email), (Slack, config.slack))
    return [
        kind(phases=phases, recipients_email=addresses) for kind, addresses in kinds if addresses
    ]


def _build_security_context() -> SecurityContext | None:
    """Build the identity of a run: the deployment's service account, also for pods that have none
    in their template.
    """
    account = DEPLOYMENT.service_account
    return SecurityContext(run_as=Identity(k8s_service_account=account)) if account else None


# Names are given: without one ``get_or_create`` drops the options silently. A schedule fails
# silently where an input has no value, so the recipe is fixed.
nightly = LaunchPlan.get_or_create(
    name="workflows.launch_plans.nightly",
    workflow=post_train,
    fixed_inputs={"recipe": _read_recipe_with_approval()},
    schedule=CronSchedule(schedule="0 2 * * *"),  # UTC
    notifications=_build_notifications(),
    security_context=_build_security_context(),
)
"""Every night, once the launch plan is activated."""

manual = LaunchPlan.get_or_create(
    name="workflows.launch_plans.manual",
    workflow=post_train,
    default_inputs={"recipe": _read_recipe_with_approval()},
    notifications=_build_notifications(),
    security_context=_build_security_context(),
)
"""On demand. Another recipe may be given; it is used as it is."""
