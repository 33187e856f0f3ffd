"""What a turn of the flywheel leaves behind: bad cases, and the pairs that people label next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ebbflow.compute import set_up_process
from ebbflow.data.labels import read_labels
from ebbflow.data.prompt_files import find_quoted_text
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.recipe import Recipe
from ebbflow.recipe.recipe import SEEDS
from ebbflow.reward_training.bad_cases import (
    BAD_CASES,
    BadCase,
    find_disagreements,
    find_regressions,
    find_rejected_prompts,
    write_bad_cases,
)
from ebbflow.reward_training.folder import RewardModelRecord, require_reward_model_config
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


def choose_turn_seed(recipe: Recipe, record: RewardModelRecord) -> int:
    """Choose the seed of a turn's run: the recipe's in the first turn, then one for each set of
    labels.

    Stages choose prompts and noise by the seed. With the same one every turn would train the
    champion again on the prompts and the noise that it was made with: in the glyph model's
    benchmark the reward of those samples then rises, and that of held-out prompts falls.

    Args:
        record: of the reward model that was trained on the labels.
    """
    # Without a champion to compare with, this is the first turn. `ebbflow label` has trained the
    # stages on data for it, with the recipe's seed.
    if record.compared_with is None:
        return recipe.seed
    # A function of the labels: a turn that was killed resumes with the same recipe.
    return derive_seed(recipe.seed, "turn", record.labels_digest) % SEEDS


def list_askable_prompts(
    recipe: Recipe, table: Sequence[Prompt], cases: Sequence[BadCase]
) -> list[Prompt]:
    """List the prompts that people may be asked about: those of the training split, and, where
    prompts are random strings, bad cases of earlier turns, whose strings were others.

    Args:
        table: the prompts of all splits.
    """
    askable = [prompt for prompt in table if prompt.split == "train"]
    if recipe.prompts.source_files:
        return askable
    # Held-out and validation prompts judge policies, so nobody labels pictures of them.
    known = {prompt.prompt for prompt in table}
    earlier = dict.fromkeys(case.prompt for case in cases if case.prompt not in known)
    next_id = max(prompt.prompt_id for prompt in table) + 1
    return askable + [
        replace(askable[0], prompt_id=next_id + index, prompt=text, target=find_quoted_text(text))
        for index, text in enumerate(earlier)
    ]


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
        list_askable_prompts(recipe, read_prompts(prompts), cases),
        [case.prompt for case in cases],
        config.queue,
        seed,
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
