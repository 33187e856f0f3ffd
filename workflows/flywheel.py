"""A turn of the flywheel: labels to a reward model, a policy that is trained on it, its gate, and
what people label next.
"""

from __future__ import annotations

from flytekit import dynamic, workflow
from flytekit.types.directory import FlyteDirectory

from ebbflow.recipe import Recipe
from tasks.collect_bad_cases import collect_bad_cases
from tasks.evaluate_policy import evaluate_policy
from tasks.prepare_prompts import prepare_prompts
from tasks.resources import light_resources
from tasks.train_reward_model import train_reward_model
from workflows.post_training import post_train, prepare_base_model, prepare_policy


@workflow
def turn_flywheel(recipe: Recipe) -> FlyteDirectory:
    """Train the reward model on the labels so far, post-train a policy on it, and collect the bad
    cases and the pairs that people label next.
    """
    # A task before the pipeline, so that the record of the run has the version that it trained on.
    pinned = train_reward_model(recipe=recipe)
    return train_and_collect(recipe=pinned)


@dynamic(**light_resources())
def train_and_collect(recipe: Recipe) -> FlyteDirectory:
    """Post-train a policy on a registered reward model, and collect the next turn from it."""
    result = post_train(recipe=recipe)
    # These nodes of the run are cached: they return what the pipeline has used.
    prompts = prepare_prompts(recipe=recipe, run=result.run)
    base = prepare_base_model(recipe=recipe, run=result.run)
    untrained = prepare_policy(recipe=recipe, run=result.run, base=base)
    before = evaluate_policy(
        recipe=recipe, run=result.run, base=base, policy=untrained, prompts=prompts, label="before"
    )
    return collect_bad_cases(
        recipe=recipe,
        run=result.run,
        base=base,
        prompts=prompts,
        before=before,
        candidate=result.candidate,
    )
