"""Which prompts a step takes, and what it does about groups that say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ebbflow.algorithms.advantages import compute_advantages, varied_prompts
from ebbflow.data.sampling import prompt_batch
from ebbflow.models import load_model
from ebbflow.online.local_workers import local_workers
from ebbflow.online.loop import run_online_stage
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.recipe.choices import AdvantagesConfig
from ebbflow.rewards.combine import Scorer
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.conftest import Darkness


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


@pytest.fixture
def sampler_of(make_recipe, make_prompts):
    """``sampler_of(12, **online)``: the sampler of a stage on so many prompts."""
    return lambda count, **online: PromptSampler(StageContext(make_recipe(online=online), 0, 0), make_prompts(count))


def test_without_further_keys_it_is_the_batch_of_the_step(sampler_of, make_prompts):
    sampler = sampler_of(9, steps=5)
    for step in range(5):
        assert sampler.batch(step) == prompt_batch(make_prompts(9), 2, step, sampler.ctx.seed)
    assert sampler.all_steps() == [prompt for step in range(5) for prompt in sampler.batch(step)]


def test_as_many_other_prompts_are_drawn_as_say_nothing(sampler_of):
    sampler = sampler_of(12, prompts_per_step=4, refill_rounds=1)
    taken = sampler.batch(3)
    assert sampler.further(3, taken, ids(taken)) == []
    two = sampler.further(3, taken, ids(taken)[:2])
    four = sampler.further(3, taken, [])
    assert (len(two), len(four), four[:2]) == (2, 4, two)
    assert not set(ids(taken)) & set(ids(four))
    assert (
        sampler.further(3, [*taken, *two], []) == sampler.further(3, taken, [])[2:] + sampler.further(3, [*taken, *four], [])[:2]
    )
    assert sampler.further(4, taken, []) != four
    assert len(sampler.further(3, [*taken, *four], [])) == 4
    assert len(sampler_of(6, prompts_per_step=4).further(0, sampler.prompts[:4], [])) == 2


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_a_prompt_varies_if_it_has_advantages(combine):
    """The rewards of prompt 3 cancel in their sum; prompt 4 has one score alone."""
    prompt_ids, config = np.repeat([1, 2, 3, 4], 2), AdvantagesConfig(combine=combine)
    scores = {"a": np.array([0, 1, 5, 5, 0, 1, 2, np.nan]), "b": np.array([0, 0, 0, 0, 1, 0, 0, 1])}
    weights = {"a": 1.0, "b": 1.0}
    varied = varied_prompts(scores, weights, prompt_ids, config)
    assert varied == ([1] if combine == "sum" else [1, 3])
    assert varied == np.unique(prompt_ids[compute_advantages(scores, weights, prompt_ids, config).keep]).tolist()


class Judge(Darkness):
    """The samples of the prompts with these ids score differently."""

    def __init__(self, varied):
        self.varied, self.seen = varied, []

    def __call__(self, images, prompts):
        result = super().__call__(images, prompts)
        result.values[[prompt.prompt_id not in self.varied for prompt in prompts]] = 0.5
        self.seen.append(sorted(set(ids(prompts))))
        return result


@pytest.fixture
def run(make_recipe, make_prompts, base_folder):
    """``run(judge, **online)``: the metrics of each step."""

    def stage(judge, **online):
        ctx, recorder = StageContext(make_recipe(online={"group_size": 2, "micro_batch": 16, **online}), 0, 0), MetricsRecorder()
        updater = PolicyUpdater(Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online)
        run_online_stage(ctx, local_workers(ctx, updater, Scorer(((judge, 1.0),))), make_prompts(8), recorder)
        return recorder.metrics

    return stage


def test_a_step_is_refilled_until_enough_groups_vary_or_the_rounds_are_over(run):
    """Two of eight prompts vary, and a step wants two: with enough rounds every step finds them, and then stops."""
    two = {3, 4}
    found = run(Judge(two), steps=2, refill_rounds=7)
    assert all(row["group/size"] == 2 and row["loss"] != 0 and row["skipped_updates"] == 0 for row in found)
    kept = [(2 + row["group/refilled"]) * (1 - row["group/zero_std_share"]) for row in found]
    assert kept == pytest.approx([2, 2])
    nothing = Judge(set())
    (row,) = run(nothing, steps=1, refill_rounds=2)
    assert (row["group/refilled"], row["group/zero_std_share"], row["skipped_updates"]) == (4, 1, 1)
    assert len({prompt for seen in nothing.seen for prompt in seen}) == 6
    (row,) = run(Judge(set(range(8))), steps=1, refill_rounds=2)
    assert row["group/refilled"] == 0
