"""Launch plans: retrain on the schedules of the deployment, or start the pipeline by hand. All ask
a person before promoting, unless told otherwise.

A schedule is an entry of the deployment's ``schedules``. Without any, ``EBBFLOW_RECIPE`` names the
recipe of the schedule ``nightly`` when you register; it is also the default recipe of ``manual``,
which otherwise is recipes/glyph.yaml.
"""

from __future__ import annotations

import logging
import os

from flytekit import (
    ConcurrencyLimitBehavior,
    ConcurrencyPolicy,
    CronSchedule,
    Email,
    LaunchPlan,
    Slack,
)
from flytekit.core.notification import Notification
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.models.security import Identity, SecurityContext

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.paths import SHIPPED
from tasks.resources import DEPLOYMENT
from tasks.schedules import NotificationsConfig, ScheduleConfig
from tasks.transformers import write_recipe_text
from workflows.post_training import post_train_by_name
from workflows.retraining import retrain

logger = logging.getLogger(__name__)
RECIPE = "EBBFLOW_RECIPE"
DEFAULT_NAME = "glyph"
APPROVAL_HOURS = 72.0
"""Default of ``manual``: enough for a weekend."""


def _list_schedules() -> list[ScheduleConfig]:
    """List the deployment's schedules, or else the one of ``EBBFLOW_RECIPE``."""
    if DEPLOYMENT.schedules:
        return DEPLOYMENT.schedules
    file = os.environ.get(RECIPE)
    if file:
        return [ScheduleConfig(name="nightly", recipe=file)]
    # A schedule of the default recipe would fail every night: its output is on the disk of a pod.
    logger.warning(
        "no schedule is registered: list schedules in the deployment file, or set %s=my.yaml, a"
        " recipe whose output is a URI",
        RECIPE,
    )
    return []


def _read_scheduled_recipe(schedule: ScheduleConfig) -> Recipe:
    """Read the recipe of a schedule, always with approval by a person: nobody watches it.

    Raises:
        RecipeError: it names what no pod has, so that every run would fail.
    """
    recipe = load_recipe(schedule.recipe)
    sources = [*recipe.prompts.source_files, recipe.prompts.held_out_source]
    named = {
        "output": [recipe.output],
        "prompts": [source for source in sources if source],
        "pairs or data": [file for stage in recipe.stages for file in stage.source_files],
    }
    for key, values in named.items():
        for value in values:
            if "://" not in value and not value.startswith(SHIPPED):
                raise RecipeError(
                    f"schedule {schedule.name}: {key} = {value!r} of {schedule.recipe} is on the"
                    " disk of this machine, so every run would fail; give a URI such as"
                    " s3://bucket/name"
                )
    # Files that Ebbflow ships change with the image alone, and random strings with nothing.
    changing = [source for source in recipe.prompts.source_files if "://" in source]
    if changing and not recipe.prompts.held_out_source:
        logger.warning(
            "schedule %s: %s of %s holds out prompts of %s itself, which the first promotion pins:"
            " once the file changes, runs fail. If it ever does, set prompts.held_out_source and"
            " prompts.held_out (docs/promotion.md)",
            schedule.name,
            "prompts.mixture" if recipe.prompts.mixture else "prompts.source",
            schedule.recipe,
            ", ".join(changing),
        )
    promotion = recipe.promotion.model_copy(
        update={"approval": recipe.promotion.approval or schedule.approval}
    )
    return recipe.model_copy(update={"promotion": promotion})


def _name_default_recipe() -> str:
    """Name the recipe of ``manual`` as the console shows it: the text of the user's own, whose file
    no pod has.
    """
    file = os.environ.get(RECIPE)
    return write_recipe_text(load_recipe(file)) if file else DEFAULT_NAME


def _build_notifications(config: NotificationsConfig) -> list[Notification]:
    """Build the notifications of those who hear of the end of a run."""
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


def _build_scheduled_plan(schedule: ScheduleConfig) -> LaunchPlan:
    """Build the launch plan of a schedule, which runs once it is activated."""
    # The name is given: without one ``get_or_create`` drops the options silently. A schedule fails
    # silently where an input has no value, so the recipe is fixed.
    return LaunchPlan.get_or_create(
        name=f"workflows.launch_plans.{schedule.name}",
        workflow=retrain,
        fixed_inputs={"recipe": _read_scheduled_recipe(schedule)},
        schedule=CronSchedule(schedule=schedule.cron, kickoff_time_input_arg="kickoff_time"),
        notifications=_build_notifications(schedule.notifications or DEPLOYMENT.notifications),
        security_context=_build_security_context(),
        # Two nights at once would compare with the same champion, and one of them in vain.
        concurrency=ConcurrencyPolicy(1, ConcurrencyLimitBehavior.SKIP),
    )


scheduled = {schedule.name: _build_scheduled_plan(schedule) for schedule in _list_schedules()}
"""By the name of the schedule."""

manual = LaunchPlan.get_or_create(
    name="workflows.launch_plans.manual",
    workflow=post_train_by_name,
    default_inputs={"recipe": _name_default_recipe(), "approval_hours": APPROVAL_HOURS},
    notifications=_build_notifications(DEPLOYMENT.notifications),
    security_context=_build_security_context(),
)
"""On demand, with any recipe, by its name, its URI or its text."""
