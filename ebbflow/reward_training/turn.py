"""What a turn of the flywheel leaves behind: bad cases, and the pairs that people label next."""

from __future__ import annotations

import logging
from pathlib import Path

from ebbflow.compute import set_up_process
from ebbflow.data.labels import read_labels
from ebbflow.data.prompts import read_prompts
from ebbflow.recipe import Recipe
from ebbflow.reward_training.bad_cases import (
    BAD_CASES,
    find_disagreements,
    find_regressions,
    find_rejected_prompts,
    write_bad_cases,
)
from ebbflow.reward_training.folder import require_reward_model_config
from ebbflow.reward_training.queue import choose_prompts, generate_queue, open_served_policy
from ebbflow.rewards.built_in.model import ModelReward, ModelRewardConfig
from ebbflow.rewards.combine import load_reward
from ebbflow.seeding import derive_seed
from ebbflow.storage.artifacts import write_new_folder
from ebbflow.storage.layout import QUEUE
from ebbflow.storage.tables import read_table

MAX_CASES = 50
"""Bad cases of each kind."""
logger = logging.getLogger(__name__)


def collect_next_turn(
    recipe: Recipe,
    base: Path,
    policy_folder: Path,
    prompts: Path,
    before: Path,
    after: Path,
    labels: list[str],
    folder: Path,
) -> None:
    """Write ``prompts.jsonl`` and ``queue.parquet`` of the next turn into a committed folder.

    Args:
        recipe: with its reward models pinned.
        policy_folder: the policy whose pictures are compared next.
        before, after: samples of the evaluations of the policy that training started from, and of
            this one.
    """
    set_up_process(recipe)
    config = require_reward_model_config(recipe)
    # A recipe may train on other rewards as well; only reward models learn from labels.
    rewards = [
        load_reward(reward) for reward in recipe.rewards if isinstance(reward, ModelRewardConfig)
    ]
    cases = []
    samples = read_table(after)
    answers = read_labels(labels)
    # Of the labels: with the recipe's own seed every turn would ask about the same prompts, and the
    # number of held-out prompts, which the gate needs, would not grow.
    seed = derive_seed(recipe.seed, "turn", answers.digest)
    for reward in rewards:
        assert isinstance(reward, ModelReward)
        cases += find_disagreements(reward.network, answers, MAX_CASES)
    cases += find_regressions(samples, read_table(before), MAX_CASES)
    cases += find_rejected_prompts(samples, MAX_CASES)
    # The candidate, also where the gate refused it: its pictures are where rewards fail.
    model, policy = open_served_policy(recipe, base, policy_folder)
    chosen = choose_prompts(
        read_prompts(prompts, "train"), [case.prompt for case in cases], config.queue, seed
    )
    with write_new_folder(folder) as unfinished:
        write_bad_cases(unfinished / BAD_CASES, cases)
        pairs = generate_queue(
            recipe,
            model,
            policy,
            chosen,
            rewards[0] if rewards else None,
            config.queue,
            seed,
            unfinished / QUEUE,
        )
    logger.info("next turn: %d bad cases, %d pairs to label", len(cases), pairs)
