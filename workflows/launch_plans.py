"""Launch plans: how the pipeline is started again and again. With their own recipe both ask a person before the champion moves.

``EBBFLOW_RECIPE`` names their recipe when you register; without it, it is recipes/glyph.yaml.
"""

from __future__ import annotations

import os
from pathlib import Path

from flytekit import CronSchedule, LaunchPlan

from ebbflow.recipe import Recipe, load_recipe
from workflows.post_training import post_train

APPROVAL = 72.0
"""Hours that a person has who was not asked when the run was planned: a weekend."""


def _recipe() -> Recipe:
    """The recipe, approved by a person also where it does not say so."""
    recipe = load_recipe(os.environ.get("EBBFLOW_RECIPE") or Path(__file__).parent / "recipes" / "glyph.yaml")
    promotion = recipe.promotion.model_copy(update={"approval": recipe.promotion.approval or APPROVAL})
    return recipe.model_copy(update={"promotion": promotion})


nightly = LaunchPlan.get_or_create(
    name="workflows.launch_plans.nightly",
    workflow=post_train,
    fixed_inputs={"recipe": _recipe()},
    schedule=CronSchedule(schedule="0 2 * * *"),  # UTC
)
"""Every night; a schedule rests until the launch plan is activated."""

manual = LaunchPlan.get_or_create(name="workflows.launch_plans.manual", workflow=post_train, default_inputs={"recipe": _recipe()})
"""When somebody wants a run; another recipe may be given, and is taken as it is."""
