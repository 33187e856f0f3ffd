"""The pipeline on a schedule: each night has a seed of its own, and trains only if something has
changed since an earlier one.
"""

from __future__ import annotations

from datetime import datetime

from flytekit import dynamic, workflow

from ebbflow.recipe import Recipe
from tasks.conclude_retraining import conclude_retraining
from tasks.plan_retraining import plan_retraining
from tasks.resources import light_resources
from workflows.post_training import post_train


@workflow
def retrain(recipe: Recipe, kickoff_time: datetime) -> str:
    """Post-train by a recipe whose seed is the time of the kickoff; return the outcome in words."""
    recipe_of_night, inputs_digest, unchanged = plan_retraining(
        recipe=recipe, kickoff_time=kickoff_time
    )
    return train_if_changed(
        recipe=recipe_of_night, inputs_digest=inputs_digest, unchanged=unchanged
    )


@dynamic(**light_resources())
def train_if_changed(recipe: Recipe, inputs_digest: str, unchanged: str) -> str:
    """Run the pipeline, unless ``unchanged`` says that there is nothing to learn."""
    # A dynamic, because only its inputs have values.
    if unchanged:
        return unchanged
    result = post_train(recipe=recipe)
    return conclude_retraining(
        run=result.run,
        decision=result.decision,
        registration=result.registration,
        inputs_digest=inputs_digest,
    )
