"""The schedules of a deployment, and who hears of their runs."""

from __future__ import annotations

from typing import Annotated, Literal

from flytekit import CronSchedule
from pydantic import AfterValidator, Field

from ebbflow.recipe.base import Strict


def _check_cron(value: str) -> str:
    """Check a schedule as flytekit does when it makes the launch plan."""
    try:
        CronSchedule(schedule=value)
    except ValueError:
        raise ValueError(
            "give five fields in UTC: minute, hour, day, month and day of the week, such as"
            " '0 2 * * 1' for Mondays at two"
        ) from None
    return value


Phase = Literal["SUCCEEDED", "FAILED", "ABORTED", "TIMED_OUT"]


class NotificationsConfig(Strict):
    """Who hears of the end of a run that a launch plan started."""

    email: list[str] = []
    slack: list[str] = []
    """Addresses of Slack channels."""
    phases: Annotated[list[Phase], Field(min_length=1)] = ["FAILED", "TIMED_OUT", "SUCCEEDED"]


class ScheduleConfig(Strict):
    """A launch plan ``workflows.launch_plans.NAME`` that retrains on a schedule, once it is
    activated.
    """

    name: Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$", max_length=40)]
    recipe: str
    """The file of a recipe, seen from where you register; its content becomes the launch plan's.
    Its ``output``, its prompt files and its ``pairs`` must be URIs.
    """
    cron: Annotated[str, AfterValidator(_check_cron)] = "0 2 * * *"
    """Minute, hour, day, month and day of the week, in UTC."""
    approval: Annotated[float, Field(gt=0)] = 72.0
    """Hours that a person has to approve a promotion, where the recipe does not set
    ``promotion.approval``: nobody watches a run at night.
    """
    notifications: NotificationsConfig | None = None
    """Default: those of the deployment."""
