"""Which prompts a step takes, and what it does about groups that say nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from varied_reward import VariedReward, ids

from ebbflow.algorithms.advantages import (
    compute_advantages,
    compute_reward_moments,
    find_varied_prompts,
)
from ebbflow.data.sampling import sample_prompts
from ebbflow.flow.noise import generate_initial_noise
from ebbflow.models import load_model
from ebbflow.models.encoding import PromptWindows
from ebbflow.online import in_flight
from ebbflow.online.in_flight import load_in_flight, save_in_flight
from ebbflow.online.loop import run_online_stage
from ebbflow.online.prompt_sampler import PromptSampler, compute_curriculum_weights
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.online.training_worker import TrainingWorker
from ebbflow.online.workers import LocalWorkers, StageError, open_local_workers
from ebbflow.recipe import RecipeError
from ebbflow.recipe.choices import AdvantagesConfig
from ebbflow.recipe.online import CurriculumConfig
from ebbflow.rewards.combine import RewardError, Scorer
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.parity import ParityError
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.checkpoint import CheckpointError
from ebbflow.training.policy import Policy
from ebbflow.training.stage_loop import StageState
from ebbflow.training.update import PolicyUpdater


@pytest.fixture
def sampler_of(make_recipe, make_prompts):
    """``sampler_of(12, **online)``: the sampler of a stage on so many prompts."""
    return lambda count, **online: PromptSampler(
        StageContext(make_recipe(online=online), 0, 0), make_prompts(count)
    )


def test_without_further_keys_it_is_the_batch_of_the_step(sampler_of, make_prompts):
    sampler = sampler_of(9, steps=5)
    for step in range(5):
        assert sampler.sample_batch(step) == sample_prompts(
            make_prompts(9), 2, step, sampler.ctx.stage_seed
        )
    (window,) = sampler.list_windows()
    assert window.steps == range(5)
    assert window.list_prompts() == [
        prompt for step in range(5) for prompt in sampler.sample_batch(step)
    ]


def test_as_many_other_prompts_are_drawn_as_say_nothing(sampler_of):
    sampler = sampler_of(12, prompts_per_step=4, refill_rounds=1)
    taken = sampler.sample_batch(3)
    assert sampler.sample_replacements(3, taken, ids(taken)) == []
    two = sampler.sample_replacements(3, taken, ids(taken)[:2])
    four = sampler.sample_replacements(3, taken, [])
    assert (len(two), len(four), four[:2]) == (2, 4, two)
    assert not set(ids(taken)) & set(ids(four))
    assert (
        sampler.sample_replacements(3, [*taken, *two], [])
        == sampler.sample_replacements(3, taken, [])[2:]
        + sampler.sample_replacements(3, [*taken, *four], [])[:2]
    )
    assert sampler.sample_replacements(4, taken, []) != four
    assert len(sampler.sample_replacements(3, [*taken, *four], [])) == 4
    assert (
        len(sampler_of(6, prompts_per_step=4).sample_replacements(0, sampler.prompts[:4], [])) == 2
    )


@pytest.mark.parametrize("combine", ["sum", "per_reward"])
def test_a_prompt_varies_if_it_has_advantages(combine):
    """The rewards of prompt 3 cancel in their sum; prompt 4 has one score alone."""
    prompt_ids = np.repeat([1, 2, 3, 4], 2)
    config = AdvantagesConfig(combine=combine)
    scores = {"a": np.array([0, 1, 5, 5, 0, 1, 2, np.nan]), "b": np.array([0, 0, 0, 0, 1, 0, 0, 1])}
    weights = {"a": 1.0, "b": 1.0}
    varied = find_varied_prompts(scores, weights, prompt_ids, config)
    assert varied == ([1] if combine == "sum" else [1, 3])
    assert (
        varied
        == np.unique(
            prompt_ids[compute_advantages(scores, weights, prompt_ids, config).keep]
        ).tolist()
    )


@pytest.fixture
def run(make_recipe, make_prompts, base_folder):
    """``run(reward, **online)``: the metrics of each step."""

    def stage(reward, **online):
        ctx = StageContext(make_recipe(online={"group_size": 2, "micro_batch": 16, **online}), 0, 0)
        recorder = MetricsRecorder()
        updater = PolicyUpdater(
            Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online_config
        )
        run_online_stage(
            ctx,
            open_local_workers(ctx, updater, Scorer(((reward, 1.0),))),
            make_prompts(8),
            recorder,
        )
        return recorder.metrics_rows

    return stage


def moments_of(rewards):
    """(prompts, moments) of the rewards of each prompt."""
    prompt_ids = np.repeat(list(rewards), [len(found) for found in rewards.values()])
    return compute_reward_moments(
        np.concatenate([np.array(found, float) for found in rewards.values()]), prompt_ids
    )


def test_a_first_pass_leaves_out_what_is_outside_the_range(sampler_of):
    found = {
        0: [0.0, 0.2],
        1: [0.4, 0.6],
        2: [0.5, 0.5],
        3: [1.0, 1.0],
        4: [0.3, np.nan],
        5: [0.6, 0.8],
    }
    keys = {"min_reward": 0.1, "max_reward": 0.7}
    for config, kept in (
        (keys, [0, 1, 2, 5]),
        (keys | {"min_std": 0.1}, [0, 1, 5]),
        ({"max_reward": 0.5}, [0, 1, 2]),
        ({"min_reward": 0.6}, [3, 5]),
    ):
        sampler = sampler_of(6, prompt_filter=config)
        sampler.filter_prompts(*moments_of(found))
        assert (sampler.state.kept_prompts, ids(sampler.remaining_prompts)) == (kept, kept)
        assert {prompt for step in range(6) for prompt in ids(sampler.sample_batch(step))} == set(
            kept
        )
        assert set(ids(sampler.sample_replacements(0, sampler.sample_batch(0), []))) <= set(kept)
        assert sampler.state.prompt_rewards == {}
    with pytest.raises(
        StageError,
        match=(
            r"leaves 1 of 6 prompts, .* means from 0.1 to 1 and standard deviations of at most 0.14"
        ),
    ):
        sampler_of(6, prompt_filter={"min_reward": 0.9}).filter_prompts(*moments_of(found))


def test_a_first_pass_tries_a_choice_of_the_prompts(sampler_of):
    some = sampler_of(40, prompt_filter={"prompts": 9, "max_reward": 1})
    assert len(set(ids(some.prompts))) == 9
    assert ids(some.prompts) == sorted(ids(some.prompts)) != list(range(9))
    (window,) = some.list_windows()
    assert window.steps == range(some.config.steps)
    assert window.list_prompts() == some.prompts
    assert some.prompts == some.remaining_prompts


def test_running_rewards_follow_the_groups_and_survive_a_checkpoint(sampler_of):
    sampler = sampler_of(4, curriculum={"rate": 0.25})
    sampler.update_curriculum(*moments_of({1: [0.0, 1.0], 3: [1.0, 1.0]}))
    sampler.update_curriculum(*moments_of({1: [1.0, 1.0]}))
    deviation = 0.5**0.5
    assert sampler.state.prompt_rewards == {
        1: (0.625, pytest.approx(0.75 * deviation)),
        3: (1.0, 0.0),
    }
    sampler.state.kept_prompts = [1, 3]
    resumed = StageState()
    resumed.load_state_dict(json.loads(json.dumps(sampler.state.state_dict())))
    assert resumed == dataclasses.replace(sampler.state, history=resumed.history)


@pytest.mark.parametrize(
    ("weight", "expected"), [("spread", [1, 0.5, 0.1, 1]), ("low_reward", [0.1, 0.5, 1, 1])]
)
def test_weights_of_a_curriculum(weight, expected):
    """Prompt 7 is new, and counts as much as the best."""
    state = StageState(prompt_rewards={4: (1.0, 0.4), 5: (0.5, 0.2), 6: (0.0, 0.0)})
    assert compute_curriculum_weights(
        CurriculumConfig(weight=weight), [4, 5, 6, 7], state
    ) == pytest.approx(expected)
    assert compute_curriculum_weights(
        CurriculumConfig(weight=weight), [4, 5], StageState()
    ) == pytest.approx([1, 1])


def test_prompts_are_drawn_in_proportion_to_their_weights(sampler_of):
    """The first of many draws: weights of 1, .5, .1 and 1 of 2.6; and one that nothing is known
    of."""
    sampler = sampler_of(4, prompts_per_step=1, curriculum={})
    sampler.state.prompt_rewards |= {0: (1.0, 0.4), 1: (0.5, 0.2), 2: (0.0, 0.0)}
    drawn = (
        np.bincount([sampler.sample_batch(step)[0].prompt_id for step in range(4000)], minlength=4)
        / 4000
    )
    assert drawn == pytest.approx(np.array([1, 0.5, 0.1, 1]) / 2.6, abs=0.03)
    assert sampler.sample_batch(7) == sampler.sample_batch(7)
    two = sampler_of(4, prompts_per_step=2, curriculum={})
    assert all(len(set(ids(two.sample_batch(step)))) == 2 for step in range(20))


@pytest.mark.parametrize(
    ("steps", "prompts_per_step"), [(4, 4), pytest.param(14, 2, marks=pytest.mark.exhaustive)]
)
def test_a_curriculum_comes_back_to_what_varies(run, steps, prompts_per_step):
    """One prompt of eight varies. Once all were seen it is in every step; in turn it would be in
    every second or fourth.
    """
    rows = run(
        VariedReward({5}),
        steps=steps,
        prompts_per_step=prompts_per_step,
        curriculum={"floor": 0.001},
    )
    taught = [row["group/zero_std_share"] < 1 for row in rows]
    assert sum(taught) > steps / 2
    assert all(taught[-steps // 3 :])


def test_rollouts_in_flight_keep_their_prompts(
    make_recipe, make_prompts, base_folder, scorer, tmp_path
):
    """A curriculum that has learnt since would draw others for the same step."""
    ctx = StageContext(make_recipe(online={"steps": 3, "curriculum": {"floor": 1e-9}}), 0, 0)
    prompts = make_prompts(8)
    workers = open_local_workers(
        ctx,
        PolicyUpdater(Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online_config),
        scorer,
    )
    sampler = PromptSampler(ctx, prompts)

    async def interrupted():
        encode = workers.training.encode
        queue, resumed = (
            RolloutQueue(ctx, workers, sampler, PromptWindows([]), encode, first_step=1)
            for _ in range(2)
        )
        await queue.start_rollouts()
        await save_in_flight(tmp_path, queue)
        before = await queue.next_batch(1)
        sampler.state.prompt_rewards |= dict.fromkeys(ids(before.distinct_prompts), (0.5, 0.0)) | {
            7: (0.5, 0.1)
        }
        await load_in_flight(tmp_path, resumed)
        return before, await resumed.next_batch(1)

    before, after = asyncio.run(interrupted())
    assert (
        ids(after.distinct_prompts) == ids(before.distinct_prompts) != ids(sampler.sample_batch(1))
    )
    assert np.array_equal(after.scores.reward, before.scores.reward)


def test_a_filtered_stage_trains_on_what_is_left_alone(run):
    reward = VariedReward({1, 2, 6})
    rows = run(reward, steps=3, prompt_filter={"samples": 2, "min_std": 1e-6})
    assert rows[0]["prompts/kept"] == 3
    assert {prompt for seen in reward.seen[1:] for prompt in seen} == {1, 2, 6}
    assert reward.seen[0] == list(range(8))
    assert [row["group/zero_std_share"] for row in rows] == [0, 0, 0]


class Failing(VariedReward):
    """Scores the samples of these prompts alone; they score differently."""

    def __call__(self, images, prompts):
        result = super().__call__(images, prompts)
        lost = [prompt.prompt_id not in self.varied for prompt in prompts]
        result.values[lost] = np.nan
        return dataclasses.replace(
            result, failures=dict.fromkeys(np.flatnonzero(lost).tolist(), "made to fail")
        )


@pytest.mark.parametrize(
    ("scored", "failed"), [({1, 2, 6}, "10 of 16"), (set(), "16 of 16")], ids=["some", "none"]
)
def test_a_first_pass_that_is_not_scored_ends_the_stage(run, scored, failed):
    """Three prompts would be enough for the steps, and nobody would know that the others were never
    tried.
    """
    with pytest.raises(
        RewardError, match=f"{failed} images .* max_failed_share = 5.0% allows; .* made to fail"
    ):
        run(Failing(scored), prompt_filter={"samples": 2, "max_reward": 1})


@pytest.mark.parametrize("shared", [False, True], ids=["noise of their own", "one noise"])
def test_the_samples_of_a_first_pass_start_as_those_of_a_step(make_recipe, make_prompts, shared):
    keys = {"steps": 3, "shared_initial_noise": shared, "prompt_filter": {"max_reward": 1}}
    ctx = StageContext(make_recipe(online=keys), 0, 0)
    prompts = make_prompts(4)
    workers = SimpleNamespace(steps_before=0)
    queue = RolloutQueue(ctx, workers, PromptSampler(ctx, prompts), MagicMock(), None)
    for filter_samples in (None, 3):
        for request in asyncio.run(queue.build_requests(0, None, prompts, filter_samples)):
            different = {
                tuple(noise) for noise in generate_initial_noise((4,), request.keys).tolist()
            }
            assert len(different) == (len(set(ids(request.prompts))) if shared else len(request))


class Stale(Diffusers):
    """An engine that keeps the weights that it began with."""

    def load(self, weights):
        """Nothing arrives."""


def test_an_engine_passes_the_gate_before_it_makes_the_first_pass(
    make_recipe, make_prompts, base_folder
):
    keys = {"engine": f"{__name__}:Stale", "prompt_filter": {"samples": 2, "max_reward": 1}}
    ctx = StageContext(make_recipe(online=keys), 0, 0)
    reward = VariedReward(set(range(8)))
    policy, other = (Policy(load_model(base_folder), ctx.recipe.policy, 0) for _ in range(2))
    other.assign_parameters(
        {name: 1.5 * value.detach() for name, value in other.parameters.items()}
    )
    trainer = TrainingWorker(ctx, PolicyUpdater(policy, ctx.online_config))
    engine = RolloutWorker(Stale(ctx, other))
    with pytest.raises(ParityError, match="generates with other weights|denoising steps are not"):
        run_online_stage(
            ctx,
            LocalWorkers(trainer, Scorer(((reward, 1.0),)), engine),
            make_prompts(8),
            MetricsRecorder(),
        )
    assert reward.seen == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt_filter": {"samples": 4}}, "it leaves nothing out; give min_reward"),
        (
            {"prompt_filter": {"min_reward": 1, "max_reward": 0.5}},
            "min_reward = 1 is above max_reward = 0.5",
        ),
        (
            {"prompt_filter": {"prompts": 1, "max_reward": 1}},
            "prompt_filter.prompts = 1 are fewer than prompts_per_step = 2",
        ),
    ],
)
def test_what_cannot_be_is_explained(make_recipe, keys, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(online=keys)


def test_a_step_is_refilled_until_enough_groups_vary_or_the_rounds_are_over(run):
    """Two of eight prompts vary, and a step wants two: with enough rounds every step finds them,
    and then stops.
    """
    two = {3, 4}
    found = run(VariedReward(two), steps=2, refill_rounds=7)
    assert all(
        row["group/size"] == 2 and row["grad_norm"] > 0 and row["skipped_updates"] == 0
        for row in found
    )
    kept = [(2 + row["group/refilled"]) * (1 - row["group/zero_std_share"]) for row in found]
    assert kept == pytest.approx([2, 2])
    nothing = VariedReward(set())
    (row,) = run(nothing, steps=1, refill_rounds=2)
    assert (row["group/refilled"], row["group/zero_std_share"], row["skipped_updates"]) == (4, 1, 1)
    assert len({prompt for seen in nothing.seen for prompt in seen}) == 6
    (row,) = run(VariedReward(set(range(8))), steps=1, refill_rounds=2)
    assert row["group/refilled"] == 0


def test_rollouts_in_flight_of_an_earlier_layout_are_refused(tmp_path):
    """Its trajectories had ``latents`` and ``next_latents``, which ``states`` have replaced."""
    folder = tmp_path / "checkpoints" / "step-00003"
    folder.mkdir(parents=True)
    tensors = {f"3/0/trajectory/{name}": torch.zeros(1) for name in ("latents", "next_latents")}
    header = {"steps": [{"step": 3, "prompts": [], "num_dropped": 0, "parts": []}], "next": 4}
    save_file(tensors, folder / in_flight.FILE, {in_flight.HEADER: json.dumps(header)})
    with pytest.raises(CheckpointError, match=f"earlier version.*remove {folder.parent} to begin"):
        asyncio.run(load_in_flight(folder, None))
