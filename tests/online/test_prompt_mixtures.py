"""Prompts of several sets: each step and shard has the shares of the mixture, and each set may have
rewards of its own.
"""

from __future__ import annotations

import dataclasses

import pytest
from varied_reward import VariedReward, ids

from ebbflow.models import load_model
from ebbflow.offline.rollouts import choose_shard_prompts
from ebbflow.online.loop import run_online_stage
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.workers import open_local_workers
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater


@pytest.fixture
def mixed(make_recipe, make_prompts):
    """``mixed(**online)``: (a stage on 3 prompts of a.txt to 1 of b.txt, which have 6 and 3, those
    prompts).
    """

    def make(**online):
        sets = [{"source": "a.txt", "weight": 3}, {"source": "b.txt", "weight": 1}]
        recipe = make_recipe(online={"prompts_per_step": 4, **online}, prompts={"mixture": sets})
        prompts = [
            dataclasses.replace(p, source="b.txt" if p.prompt_id % 3 == 0 else "a.txt")
            for p in make_prompts(9)
        ]
        return StageContext(recipe, 0, 0), prompts

    return make


def of_b(prompts):
    return sum(prompt.source == "b.txt" for prompt in prompts)


@pytest.mark.parametrize("keys", [{}, {"curriculum": {}}], ids=["in turn", "curriculum"])
def test_every_step_has_the_shares_of_the_mixture(mixed, keys):
    ctx, prompts = mixed(steps=6, refill_rounds=1, **keys)
    sampler = PromptSampler(ctx, prompts)
    for step in range(6):
        batch = sampler.sample_batch(step)
        assert (len(set(ids(batch))), of_b(batch)) == (4, 1)
        varied = [prompt.prompt_id for prompt in batch if prompt.source == "a.txt"][:2]
        further = sampler.sample_replacements(step, batch, varied)
        assert (len(further), of_b(further)) == (2, 1)
    if not keys:
        assert sorted(
            ids([p for step in range(2) for p in sampler.sample_batch(step) if p.source == "a.txt"])
        ) == [1, 2, 4, 5, 7, 8]


def test_a_shard_of_an_offline_stage_has_the_shares_too(mixed):
    ctx, prompts = mixed()
    ctx = StageContext(ctx.recipe, 0, 1)
    chosen = [
        prompt
        for shard in range(2)
        for prompt in choose_shard_prompts(ctx, prompts, shard, [p.source for p in prompts])
    ]
    assert (len(set(ids(chosen))), of_b(chosen)) == (4, 1)
    by_id = [
        i
        for shard in range(2)
        for i in choose_shard_prompts(ctx, ids(prompts), shard, [p.source for p in prompts])
    ]
    assert by_id == ids(chosen)


def test_a_stage_trains_on_a_mixture(mixed, base_folder):
    ctx, prompts = mixed(group_size=2, micro_batch=8, updates_per_step=1)
    reward = VariedReward(set(range(9)))
    updater = PolicyUpdater(
        Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online_config
    )
    run_online_stage(
        ctx, open_local_workers(ctx, updater, Scorer(((reward, 1.0),))), prompts, MetricsRecorder()
    )
    assert [sum(prompt % 3 == 0 for prompt in seen) for seen in reward.seen] == [1, 1]
    assert updater.updates == 2


class OfItsSet(VariedReward):
    """Says which prompts it scores."""

    def __init__(self, name):
        super().__init__(set(range(9)))
        self.name = name

    def __call__(self, images, prompts):
        return dataclasses.replace(super().__call__(images, prompts), metrics={})


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_a_stage_trains_on_prompt_sets_with_their_own_rewards(mixed, base_folder, combine):
    """All samples have advantages, though each has one of the two scores alone; and no row is
    called a failure.
    """
    advantages = {"combine": combine, "std": "group"}
    ctx, prompts = mixed(
        group_size=2, micro_batch=8, updates_per_step=1, refill_rounds=1, advantages=advantages
    )
    rewards = [OfItsSet("a"), OfItsSet("b")]
    recorder = MetricsRecorder()
    of_sets = {name: configure_reward("ocr", prompts=[f"{name}.txt"]) for name in "ab"}
    scorer = Scorer(((rewards[0], 1.0), (rewards[1], 2.0)), of_sets=of_sets)
    updater = PolicyUpdater(
        Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online_config
    )
    run_online_stage(ctx, open_local_workers(ctx, updater, scorer), prompts, recorder)
    assert [[prompt % 3 == 0 for prompt in seen] for seen in rewards[0].seen] == [[False] * 3] * 2
    assert [[prompt % 3 == 0 for prompt in seen] for seen in rewards[1].seen] == [[True]] * 2
    for step in recorder.metrics_rows:
        assert step["reward/scored_share"] == 1
        assert step["group/dropped_samples"] == 0
        assert step["group/refilled"] == 0
        assert step["reward/mean"] == pytest.approx(
            (6 * step["score/a"] + 2 * 2 * step["score/b"]) / 8
        )
