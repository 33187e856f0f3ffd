"""Train a reward model on labels of people, and register it."""

from __future__ import annotations

from flytekit import task

from ebbflow.recipe import Recipe
from tasks.files import fetch_prompt_file
from tasks.labels import fetch_labels
from tasks.resources import accelerated_resources


@task(**accelerated_resources())
def train_reward_model(recipe: Recipe) -> Recipe:
    """Train, register and, if it agrees better with held-out labels, promote the reward model of
    the recipe; return the recipe of the turn: with the versions and digests of its reward models,
    and its seed (``choose_turn_seed``).

    Not cached: the same labels, keys and code find the version that was made from them.
    """
    from ebbflow.compute import require_requested_gpus
    from ebbflow.launch import pin_rewards
    from ebbflow.reward_training.folder import require_reward_model_config
    from ebbflow.reward_training.run import train_and_register
    from ebbflow.reward_training.turn import choose_turn_seed
    from ebbflow.rewards.base import RewardError

    require_requested_gpus()
    config = require_reward_model_config(recipe)
    # Of copies on this machine: the training digest does not depend on where files lie.
    local = config.model_copy(
        update={
            "labels": [fetch_labels(source) for source in config.labels],
            "hacked": str(fetch_prompt_file(config.hacked)) if config.hacked else None,
        }
    )
    outcome = train_and_register(recipe.model_copy(update={"reward_model": local}))
    decision = outcome.record.decision
    if not decision.promote and outcome.record.compared_with is None:
        raise RewardError(
            f"the reward model {config.name!r} is the first one and was not promoted, so there is"
            f" none to train on: {'; '.join(decision.reasons)}"
        )
    seed = choose_turn_seed(recipe, outcome.record)
    return pin_rewards(recipe).model_copy(update={"seed": seed})
