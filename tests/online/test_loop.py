"""A few real steps of the hot loop with a reward that costs nothing, with every algorithm."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from ebbflow.algorithms import grouping
from ebbflow.algorithms.base import Algorithm, compute_flow_matching_error
from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.models.base import predict
from ebbflow.models.families.glyph import GlyphModel
from ebbflow.online import step_advantages
from ebbflow.online.local_workers import open_local_workers
from ebbflow.online.loop import run_online_stage
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.registry import ALGORITHMS
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import RewardError, Scorer
from ebbflow.rewards.groups import compute_win_rates
from ebbflow.rollouts import generate
from ebbflow.rollouts.generate import generate_samples, join_rollouts
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training import predictions
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.parameters import changed, moved, values

NAMES = list(ALGORITHMS)
TRAJECTORY = [name for name, config in ALGORITHMS.items() if config.kind == "trajectory"]
ON_SAMPLERS = [
    (a, s)
    for a in TRAJECTORY
    for s in ("flow_sde", "dance_sde", "cps")
    if (a, s) != ("grpo_guard", "cps")
]
NEEDS = {
    "distillation": {"teacher": "elsewhere"},
    "gardo": {"auxiliary": ["darkness"], "diversity": "darkness"},
}
NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}


class Imitation(ForwardConfig):
    """A user's own algorithm: imitate whole groups."""

    strength: float = 1.0


OWN = Algorithm(
    Imitation,
    lambda rows, config: (
        config.strength * compute_flow_matching_error(rows, rows.velocity),
        {"own/advantage": rows.advantage},
    ),
    select=grouping.select_groups,
)


def keys_of(name, **rest):
    """The recipe's keys of an algorithm, with those that it cannot do without."""
    return {"name": name, **NEEDS.get(name, {}), **rest}


def collect(ctx, updater, scorer, prompts, step):
    """(the batch of a step, its rollouts)."""

    async def run():
        workers = open_local_workers(ctx, updater, scorer)
        sampler = PromptSampler(ctx, prompts)
        embeddings = await workers.training.encode(prompts)
        queue = RolloutQueue(ctx, workers, sampler, lambda _, wanted: embeddings(wanted), step)
        await queue.start_rollouts()
        return await queue.next_batch(step)

    batch = asyncio.run(run())
    return batch, join_rollouts([part.rollouts for part in batch.parts])


@pytest.fixture
def run(make_recipe, make_prompts, base_folder, scorer):
    """Run an online stage; returns (policy, its parameters before, logged metrics, record)."""

    def stage(prompts=None, judge=scorer, policy_config=None, sgd=None, **online):
        recipe = make_recipe(online=online, policy=policy_config or {})
        ctx = StageContext(recipe, 0, 0)
        model = load_model(base_folder)
        recorder = MetricsRecorder()
        policy = Policy(model, recipe.policy, 0)
        before = values(policy)
        policy.copies["teacher"] = moved(policy, 0.02)
        for name in ctx.following_copies:
            policy.ensure_copy(name)
        optimizer = torch.optim.SGD(policy.parameters.values(), sgd) if sgd else None

        updater = PolicyUpdater(policy, ctx.online_config, optimizer=optimizer)
        record = run_online_stage(
            ctx, open_local_workers(ctx, updater, judge), prompts or make_prompts(6), recorder
        )
        assert [metrics["step"] for metrics in recorder.metrics_rows] == list(
            range(ctx.online_config.steps)
        )
        return policy, before, recorder.metrics_rows, record

    return stage


EVERY_STEP = {
    "reward/mean",
    "reward/std",
    "reward/min",
    "reward/max",
    "reward/scored_share",
    "score/darkness",
    "score/brightness",
    "group/size",
    "group/zero_std_share",
    "group/dropped_samples",
    "advantage/mean",
    "advantage/std",
    "advantage/max_magnitude",
    "loss",
    "grad_norm",
    "lr",
    "updates",
    "velocity_drift",
    "alarm/velocity_drift",
    "seconds/rollout",
    "seconds/scoring",
    "seconds/training",
    "ms_per_image/rollout",
    "ms_per_image/scoring",
    "ms_per_image/training",
    "images_per_second",
    "utilisation/rollout",
    "utilisation/reward",
    "utilisation/training",
}
PPO = {"clip/up", "clip/down"}
RATIO = {"ratio/mean", "ratio/deviation", "kl/old"}
MATCHING = {"matching/distance", "matching/gradient", "fake/loss", "fake/grad_norm"}
ITS_OWN = {
    "flow_grpo": PPO | RATIO | {"kl/reference"},
    "flow_grpo_fast": PPO | RATIO,
    "mix_grpo": PPO | RATIO | {"kl/reference"},
    "dance_grpo": PPO | RATIO,
    "branch_grpo": PPO | RATIO,
    "tempflow_grpo": PPO | RATIO | {"kl/reference", "tempflow/weight"},
    "gardo": PPO
    | RATIO
    | {"kl/reference", "reference/reset", "gardo/share", "gardo/gated_share", "gardo/diversity"},
    "grpo_guard": PPO | RATIO | {"guard/bias", "guard/ratio_deviation"},
    "flow_dppo": RATIO | {"dppo/divergence", "dppo/dropped"},
    "distillation": RATIO | {"kl/teacher"},
    "diffusion_nft": {"nft/better_error", "nft/worse_error", "nft/old_deviation", "kl/reference"},
    "awm": PPO | {"awm/error", "awm/old_deviation", "awm/ratio", "kl/reference"},
    "diffusion_dpo": {"dpo/margin", "dpo/accuracy", "dpo/better_change", "dpo/worse_change"},
    "dgpo": {"dgpo/weight", "dgpo/change"},
    "crd": {"crd/implied", "crd/miss", "crd/agreement", "kl/reference"},
    "sft": set(),
    "rwr": {"rwr/weight"},
    "refl": {"refl/reward", "refl/active"},
    "draft": {"draft/reward"},
    "srpo": {"srpo/reward", "srpo/margin", "srpo/active"},
    "dmd2": MATCHING,
    "tdm": MATCHING,
    "tdm_r1": MATCHING
    | {"matching/reward_gradient", "surrogate/loss", "surrogate/grad_norm"}
    | {f"surrogate/{name}" for name in ("weight", "change", "distance", "clipped", "stopped")},
}


@pytest.mark.parametrize(
    "policy_config", [{}, {"train": "lora", "rank": 4, "alpha": 8}], ids=["full", "lora"]
)
@pytest.mark.parametrize("name", NAMES)
def test_steps_change_the_policy_and_say_everything(run, name, policy_config):
    policy, before, logged, record = run(
        policy_config=policy_config,
        algorithm=keys_of(name),
        steps=2,
        updates_per_step=2,
        micro_batch=4,
    )
    assert changed(policy, before)
    assert all(torch.equal(value, before[key]) for key, value in policy.copies["reference"].items())
    assert len(logged) == 2
    for metrics in logged:
        assert metrics.keys() >= EVERY_STEP | ITS_OWN[name]
        assert not (PPO | RATIO | {"kl/reference"}) - ITS_OWN[name] & metrics.keys()
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["grad_norm"] > 0
        assert metrics["score/darkness"] == pytest.approx(metrics["reward/mean"])
        assert metrics["score/brightness"] == pytest.approx(1 - metrics["reward/mean"])
    assert [metrics["updates"] for metrics in logged] == [2, 4]
    assert (record.label, record.samples, record.optimizer_steps, record.algorithm) == (
        "1.1 online",
        16,
        4,
        name,
    )
    assert record.alarms == []
    assert record.seconds.pop("encoding") > 0
    assert record.seconds == pytest.approx(
        {
            phase: sum(metrics[f"seconds/{phase}"] for metrics in logged)
            for phase in ("rollout", "scoring", "training")
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_do_not_change_a_step(run, name):
    """Smaller than a group, not a divisor of anything, and everything at once; pairs and groups
    stay whole.
    """
    steps = {}
    for size in (64, 3, 1):
        policy, before, logged, _ = run(
            algorithm=keys_of(name), sgd=0.05, steps=1, micro_batch=size
        )
        steps[size] = torch.cat(
            [(policy.parameters[key] - before[key]).flatten() for key in before]
        )
        assert ("grad_variance" in logged[0]) == (size < 64)
    assert steps[64].norm() > 0
    for size in (3, 1):
        assert (steps[size] - steps[64]).norm() < 1e-3 * steps[64].norm()


@pytest.mark.parametrize("name", ["mix_grpo", "diffusion_nft"])
def test_passes_of_rollouts_and_updates_are_equal(run, monkeypatch, name):
    """Groups of 6 in micro-batches of 4 are passes of 3 and 3, not of 4 and 2."""
    sizes = {generate: set(), predictions: set()}

    def record_rows(module, predict=predict):
        def predict_and_record(model, latents, *arguments, **keys):
            sizes[module].add(len(latents))
            return predict(model, latents, *arguments, **keys)

        monkeypatch.setattr(module, "predict", predict_and_record)

    record_rows(generate)
    record_rows(predictions)
    _, _, logged, _ = run(
        algorithm=keys_of(name), steps=1, prompts_per_step=2, group_size=6, micro_batch=4
    )
    assert sizes == {generate: {3}, predictions: {3}}
    assert logged[0].get("ratio/first_deviation", 0) == 0


def test_a_users_own_algorithm_trains(run):
    own = {
        "name": "custom",
        "path": f"{__name__}:OWN",
        "options": {"strength": 0.5, "noise_levels": 1},
    }
    policy, before, logged, record = run(algorithm=own, window=None, steps=1)
    assert changed(policy, before)
    assert logged[0]["own/advantage"] == pytest.approx(logged[0]["advantage/mean"], abs=1e-6)
    assert record.algorithm == f"{__name__}:OWN"


@pytest.mark.parametrize(("name", "sampler"), ON_SAMPLERS)
def test_without_a_learning_rate_nothing_changes_and_the_ratio_stays_one(run, name, sampler):
    policy, before, logged, _ = run(
        algorithm=keys_of(name),
        steps=2,
        updates_per_step=2,
        prompts_per_step=1,
        reference={"weight": 0.1},
        sampler={"name": sampler, "steps": 4},
        optimizer={"lr": 0, "weight_decay": 0.1},
    )
    assert not changed(policy, before)
    for metrics in logged:
        assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert metrics["ratio/deviation"] < 1e-6
        assert metrics["kl/reference"] == pytest.approx(0, abs=1e-9)
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", TRAJECTORY)
def test_the_first_update_of_every_step_has_ratio_one(run, name):
    for metrics in run(
        algorithm=keys_of(name), steps=3, updates_per_step=1, optimizer={"lr": 1e-3}
    )[2]:
        assert metrics["ratio/deviation"] < 1e-6


def test_the_second_update_of_a_step_has_not(run):
    assert run(steps=1, updates_per_step=2, optimizer={"lr": 1e-3})[2][0]["ratio/deviation"] > 1e-6


def test_the_same_stage_twice_gives_the_same_bits(run):
    (one, _, first, _), (other, _, second, _) = (run(steps=2) for _ in range(2))
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())

    def repeatable(metrics):
        timed = ("seconds", "ms_per", "images_per", "push", "utilisation")
        return {name: value for name, value in metrics.items() if not name.startswith(timed)}

    assert [repeatable(metrics) for metrics in first] == [repeatable(metrics) for metrics in second]


def test_reward_rises_on_an_easy_task(run):
    """Darkness is easy: eight steps on the same prompts make the images darker."""
    logged = run(
        **{**NFT, "algorithm": {"name": "diffusion_nft", "old": {"max_decay": 0}}},
        steps=8,
        prompts_per_step=6,
        updates_per_step=1,
        optimizer={"lr": 1e-3},
    )[2]
    rewards = [metrics["reward/mean"] for metrics in logged]
    spread = logged[0]["reward/std"] / 24**0.5
    assert np.mean(rewards[-2:]) > rewards[0] + 4 * spread


def test_the_old_policy_follows_with_its_decay(run):
    # Decay 0 copies: after every update the old policy is the current one.
    copying = {**NFT, "algorithm": {"name": "diffusion_nft", "old": {"max_decay": 0}}}
    policy, before, logged, _ = run(**copying, steps=2)
    assert changed(policy, before)
    assert all(
        torch.equal(value, policy.parameters[name]) for name, value in policy.copies["old"].items()
    )
    assert all(metrics["nft/old_deviation"] == pytest.approx(0, abs=1e-10) for metrics in logged)
    # Decay .9 lags behind.
    lagging = {**NFT, "algorithm": {"name": "diffusion_nft", "old": {"slope": 0.9}}}
    policy, before, _, _ = run(**lagging, steps=1, updates_per_step=1)
    for name, value in policy.copies["old"].items():
        assert torch.allclose(value, 0.9 * before[name] + 0.1 * policy.parameters[name], atol=1e-6)


class Turned(Reward):
    """Stub reward: another one, times a factor and without its failures."""

    has_gradient = True

    name = "darkness"

    def __init__(self, reward, factor):
        self.reward = reward
        self.factor = factor

    def __call__(self, images, prompts):
        return RewardResult(self.factor * self.reward(images, prompts).values + 0.5)

    def score_with_gradient(self, images, prompts):
        return self.factor * self.reward.score_with_gradient(images, prompts) + 0.5


@pytest.fixture
def turned(scorer):
    """``turned(-1)``: the scorer with its reward turned round; with 0 everyone gets the same."""
    return lambda factor: Scorer(((Turned(scorer.rewards[0][0], factor), 1.0),))


@pytest.mark.parametrize(
    "name", ["mix_grpo", "grpo_guard", "flow_dppo", "dgpo", "awm", "refl", "draft", "srpo"]
)
def test_parameters_move_against_a_negated_reward(run, turned, name):
    """The same stage with the reward turned round moves the parameters the other way, on the
    whole."""
    config = {
        "steps": 1,
        "updates_per_step": 1,
        "algorithm": {"name": name},
        "reference": {"weight": 0},
        "sgd": 0.01,
    }
    moves = []
    for judge in (turned(1), turned(-1)):
        policy, before, _, _ = run(judge=judge, **config)
        moves.append(torch.cat([(policy.parameters[n] - before[n]).flatten() for n in before]))
    assert torch.cosine_similarity(*moves, dim=0) < -0.99


class Darkest(Reward):
    """Stub reward of groups: the share of the other images that are lighter."""

    scores = "groups"

    name = "darkest"

    def __call__(self, images, prompts):
        light = images.mean((1, 2, 3))
        return RewardResult(compute_win_rates(np.sign(light[None] - light[:, None]) / 2 + 0.5))


def test_a_reward_that_compares_trains_on_whole_groups(run, scorer):
    """On the glyph model as on any: of groups of four, in requests of two groups, with and without
    a reward of single images.
    """
    policy, before, logged, record = run(judge=Scorer(((Darkest(), 1.0),)), steps=2)
    assert changed(policy, before)
    assert record.alarms == []
    for metrics in logged:
        assert metrics["reward/scored_share"] == 1
        assert metrics["score/darkest"] == pytest.approx(0.5)
        assert (metrics["reward/min"], metrics["reward/max"]) == (0, 1)
    _, _, (both, _), _ = run(judge=Scorer(((Darkest(), 1.0), *scorer.rewards)), steps=2)
    assert both["reward/mean"] == pytest.approx(0.5 + both["score/darkness"])


def test_failed_samples_are_masked_and_too_many_stop_the_stage(run, make_prompts):
    broken = [
        type(p)(**{**vars(p), "target": "FAIL"}) if p.prompt_id == 0 else p for p in make_prompts(2)
    ]
    with pytest.raises(RewardError, match=r"4 of 8 images.*max_failed_share"):
        run(prompts=broken)


WITHOUT_REWARDS = ["distillation", "dmd2", "tdm", "tdm_r1"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_REWARDS])
def test_groups_that_say_nothing_train_nothing(run, turned, name):
    """A reward that gives everyone the same: no update, no crash, and the metrics say why."""
    policy, before, logged, record = run(judge=turned(0), algorithm=keys_of(name))
    assert not changed(policy, before)
    assert record.optimizer_steps == 0
    for metrics in logged:
        assert metrics["group/zero_std_share"] == 1
        assert metrics["group/dropped_samples"] == 8
        assert metrics["updates"] == 0
        assert "loss" not in metrics


@pytest.mark.parametrize("name", WITHOUT_REWARDS)
def test_a_teacher_is_learnt_from_whatever_the_reward_says(run, turned, name):
    policy, before, logged, record = run(judge=turned(0), algorithm=keys_of(name))
    assert changed(policy, before)
    assert record.optimizer_steps == 2
    assert logged[0]["group/zero_std_share"] == 1


def test_a_step_collects_whole_groups_with_new_noise(make_recipe, make_prompts, model, scorer):
    ctx = StageContext(make_recipe(), 0, 0)
    updater = PolicyUpdater(Policy(model, ctx.recipe.policy, 0), ctx.online_config)
    both = [collect(ctx, updater, scorer, make_prompts(2), step) for step in (0, 1)]
    requests = [step.requests[0] for step, _ in both]
    for (step, rollouts), request in zip(both, requests, strict=True):
        assert len(step.requests) == 1
        assert len(request.keys) == 8
        assert len(set(request.keys.prompt_ids)) == 2
        assert all(request.keys.prompt_ids.count(key) == 4 for key in request.keys.prompt_ids)
        images = model.decode_latents(rollouts.latents)
        assert images.shape == (8, 16, 32, 3)
        assert step.scores.reward == pytest.approx(1 - images.mean((1, 2, 3)) / 255)
    pairs = [
        set(zip(request.keys.prompt_ids, request.keys.samples, strict=True)) for request in requests
    ]
    assert len(pairs[0] | pairs[1]) == 16
    (_, rollouts), (_, later) = both
    assert rollouts.trajectory.steps.tolist() == [0, 1]
    assert later.trajectory.steps.tolist() == [1, 2]
    sample_index = torch.from_numpy(requests[0].sample_index)
    conditioning = requests[0].conditioning.select_rows(sample_index)
    again = generate_samples(
        model,
        conditioning,
        requests[0].keys,
        ctx.config.sampler,
        Plan((0, 1), (0, 1)),
        ctx.config.micro_batch,
    )
    assert torch.equal(again.latents, rollouts.latents)


def test_the_old_policy_generates_where_there_is_one(make_recipe, make_prompts, model, scorer):
    for algorithm, same in ((NFT, True), ({}, False)):
        ctx = StageContext(make_recipe(online=algorithm), 0, 0)
        policy = Policy(model, ctx.recipe.policy, 0)
        policy.ensure_copy("old")
        before = collect(ctx, PolicyUpdater(policy, ctx.online_config), scorer, make_prompts(6), 0)[
            1
        ].latents
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter += 0.02
        after = collect(ctx, PolicyUpdater(policy, ctx.online_config), scorer, make_prompts(6), 0)[
            1
        ].latents
        assert torch.equal(before, after) == same


def watch_updates(monkeypatch):
    """The batches that updates are given; none is taken."""
    batches = []

    def watch(updater, batch, passes, prompt_sets):
        batches.append((batch, passes))
        updater.updates += 1
        return {"loss": 0.0}

    monkeypatch.setattr(PolicyUpdater, "update_policy", watch)
    return batches


def test_the_updates_of_a_step_share_out_its_samples_mixed(run, monkeypatch):
    batches = watch_updates(monkeypatch)
    run(**NFT, steps=1, updates_per_step=1)
    run(**NFT, steps=1, updates_per_step=2)
    parts = [
        (set(zip(b.keys.prompt_ids, b.keys.samples, strict=True)), set(b.keys.prompt_ids))
        for b, _ in batches
    ]
    (whole, prompts), *halves = parts
    assert [len(samples) for samples, _ in halves] == [4, 4]
    assert halves[0][0] | halves[1][0] == whole
    assert halves[0][1] == halves[1][1] == prompts
    assert len(prompts) == 2


def test_the_ratio_of_awm_is_one_in_the_first_update_of_every_step_alone(run):
    awm = {
        "algorithm": {"name": "awm"},
        "sampler": {"name": "ode", "steps": 3},
        "steps": 2,
        "sgd": 0.05,
    }
    alone, several = (run(**awm, updates_per_step=updates)[2] for updates in (1, 2))
    assert [metrics["awm/ratio"] for metrics in alone] == [1, 1]
    assert all(abs(metrics["awm/ratio"] - 1) > 1e-7 for metrics in several)


def test_whole_groups_are_dealt_out_to_the_updates(run, monkeypatch):
    batches = watch_updates(monkeypatch)
    run(
        algorithm={"name": "dgpo", "noise_levels": 1},
        steps=1,
        prompts_per_step=3,
        updates_per_step=2,
        micro_batch=4,
    )
    members = [list(batch.keys.prompt_ids) for batch, _ in batches]
    assert sorted(map(len, members)) == [4, 8]
    assert {len(ids) // 4 for ids in members} == {len(set(ids)) for ids in members}
    assert [passes for _, passes in batches] == [len(set(ids)) for ids in members]
    assert not set(members[0]) & set(members[1])


def test_direct_align_knows_the_noise_that_each_sample_came_from(run, monkeypatch):
    batches = watch_updates(monkeypatch)
    sampler = {"name": "ode", "steps": 3}
    policy, *_ = run(algorithm={"name": "srpo"}, sampler=sampler, steps=1, updates_per_step=2)
    assert len(batches) == 2
    for batch, _ in batches:
        latents = batch.noise
        sigmas = policy.model.compute_sigmas(3)
        with torch.no_grad():
            for step in range(3):
                conditioning = batch.inputs.conditioning.select_rows(batch.inputs.sample_index)
                velocity = policy.model.predict_velocity(
                    latents, sigmas[step].expand(len(latents)), conditioning
                )
                latents = latents + (sigmas[step + 1] - sigmas[step]) * velocity
        torch.testing.assert_close(latents, batch.clean, rtol=1e-4, atol=1e-5)


def test_noise_levels_of_a_schedule_are_the_samplers(run, monkeypatch):
    batches = watch_updates(monkeypatch)
    run(**NFT, steps=1)
    sigmas = torch.cat([batch.inputs.sigma for batch, _ in batches])
    assert sorted(sigmas.unique().tolist()) == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-6)


def test_samples_of_a_prompt_can_share_an_initial_noise_that_is_new_in_every_step(
    make_recipe, make_prompts, base_folder, scorer
):
    starts = []
    for shared in (True, False):
        ctx = StageContext(
            make_recipe(
                online={"shared_initial_noise": shared, "window": {"kind": "fixed", "size": 1}}
            ),
            0,
            0,
        )
        updater = PolicyUpdater(
            Policy(load_model(base_folder), ctx.recipe.policy, 0), ctx.online_config
        )
        steps = [
            collect(ctx, updater, scorer, make_prompts(6), step)[1]
            .trajectory.latents[:, 0]
            .flatten(1)
            for step in (0, 1)
        ]
        starts.append(
            torch.cat(steps).view(4, 4, -1)
        )  # groups of two prompts and two steps, samples of each
    shared, apart = starts
    assert torch.equal(shared, apart[:, :1].expand_as(apart))
    assert len({tuple(group[0].tolist()) for group in shared}) == 4
    assert len({tuple(sample.tolist()) for group in apart for sample in group}) == 16


def test_every_node_of_a_tree_is_trained_once_with_its_own_advantage(run, monkeypatch):
    batches = watch_updates(monkeypatch)
    run(algorithm=keys_of("branch_grpo"), steps=1, updates_per_step=1)
    ((batch, _),) = batches
    assert torch.bincount(batch.steps).tolist() == [
        4,
        8,
        8,
    ]  # of two prompts, with splits at the steps 0 and 1
    assert len({tuple(row.flatten().tolist()) for row in batch.next_latents}) == 20
    assert torch.equal(batch.weight, torch.ones(20))
    rows = zip(
        batch.keys.prompt_ids,
        batch.steps.tolist(),
        batch.keys.samples,
        batch.advantage.tolist(),
        strict=True,
    )
    found = {row[:3]: row[3] for row in rows}
    for prompt in set(batch.keys.prompt_ids):
        first = {sample: found[prompt, 0, sample] for sample in (0, 2)}
        leaves = [found[prompt, 1, sample] for sample in range(4)]
        assert leaves == [found[prompt, 2, sample] for sample in range(4)]
        assert first[0] == pytest.approx(-first[2], rel=1e-3)
        assert 0.3 < abs(first[0]) < 0.71  # of two, by their standard deviation and 1e-4
        assert (first[0] > 0) == (leaves[0] + leaves[1] > leaves[2] + leaves[3])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_tree_trains_on_rollouts_of_its_own_or_an_older_policy(run, mode):
    correction = None if mode == "sync" else {"mode": "decoupled"}
    policy, before, logged, _ = run(
        algorithm=keys_of("branch_grpo"), mode=mode, correction=correction
    )
    assert changed(policy, before)
    assert all(np.isfinite(value) for metrics in logged for value in metrics.values())
    assert logged[0]["ratio/first_deviation"] < 1e-6


def test_pairs_are_of_one_prompt_the_better_first(run, monkeypatch):
    batches = watch_updates(monkeypatch)
    run(
        algorithm={"name": "diffusion_dpo", "noise_levels": 1, "pairs_share": 0.5},
        steps=1,
        updates_per_step=2,
    )
    assert [len(batch.inputs) for batch, _ in batches] == [4, 4]
    for batch, _ in batches:
        advantage = batch.advantage.view(-1, 2)
        assert (advantage[:, 0] > advantage[:, 1]).all()
        ids = np.array(batch.keys.prompt_ids).reshape(-1, 2)
        assert (ids[:, 0] == ids[:, 1]).all()


def test_more_updates_than_units_are_as_many_as_there_are(run):
    assert run(algorithm={"name": "dgpo"}, steps=2, updates_per_step=5)[3].optimizer_steps == 4


# Rough rollouts: another precision than the training's.

BYPASS = {"mode": "bypass", "weights": "none"}


@pytest.mark.parametrize("name", ["mix_grpo", "grpo_guard", "flow_dppo"])
def test_a_correction_brings_the_first_ratio_back_to_one(run, name):
    rough = {
        "algorithm": {"name": name},
        "rollout_precision": "bfloat16",
        "steps": 1,
        "updates_per_step": 1,
    }
    plain, bypassed, decoupled = (
        run(**rough, correction=correction)[2][0] for correction in (None, BYPASS, {})
    )
    assert plain["rollout/delta_mean"] == bypassed["rollout/delta_mean"], (
        "rollouts in another precision are always watched"
    )
    assert decoupled["ratio/deviation"] < 1e-6 < bypassed["ratio/deviation"]
    assert bypassed["ratio/deviation"] == pytest.approx(plain["ratio/deviation"], rel=1e-3)
    for metrics in (bypassed, decoupled):
        assert metrics["rollout/delta_max"] >= metrics["rollout/delta_mean"] > 1e-6


def test_exact_rollouts_need_no_correction(run):
    (plain, *_), (apply_rollout_correction, _, (metrics,), _) = (
        run(steps=1, sgd=0.1, correction=correction) for correction in (None, {})
    )
    assert metrics["rollout/delta_max"] < 1e-6
    assert metrics["ratio/deviation"] < 1e-6
    for key, value in plain.parameters.items():
        assert torch.allclose(value, apply_rollout_correction.parameters[key], atol=1e-6)


def test_updates_with_nothing_left_are_not_taken(run):
    policy, before, logged, record = run(
        rollout_precision="bfloat16",
        steps=1,
        correction={"weights": "none", "reject": "k1", "reject_above": 1e-12},
    )
    assert logged[0]["rollout/rejected"] == 1
    assert record.optimizer_steps == 0
    assert not changed(policy, before)


# What a stage tells and leaves behind.


def test_the_drift_alarm_stands_in_the_record(run):
    with pytest.warns(UserWarning, match="velocity drift") as warned:
        logged, record = run(steps=3, updates_per_step=1, optimizer={"lr": 1e-3}, drift_alarm=1e-9)[
            2:
        ]
    assert len(warned) == 1
    assert len(record.alarms) == 1
    assert record.alarms[0].startswith("velocity drift ")
    assert [metrics["alarm/velocity_drift"] for metrics in logged] == [0, 1, 1]


def test_statistics_of_the_prompts_run_over_the_steps_of_a_stage(run, monkeypatch):
    seen = []
    compute = step_advantages.compute_advantages

    def watch(scores, weights, prompt_ids, config, history, scored):
        seen.append(history)
        return compute(scores, weights, prompt_ids, config, history, scored)

    monkeypatch.setattr(step_advantages, "compute_advantages", watch)
    run(steps=3, prompts_per_step=6, advantages={"running": True})
    assert seen[0] is seen[1] is seen[2]
    assert {count for _, count, *_ in seen[0].state_dict()["darkness"]} == {12}


class LatentDarkness(Reward):
    """The stub reward of the images, from the latents."""

    scores = "latents"
    has_gradient = True

    name = "darkness"

    def __call__(self, latents, prompts):
        return RewardResult(
            self.score_with_gradient(torch.from_numpy(latents), prompts).numpy().astype(float)
        )

    def score_with_gradient(self, latents, prompts):
        return 1 - PIXELS(None, latents).mean((1, 2, 3))


PIXELS = GlyphModel.decode_with_gradient


@pytest.mark.parametrize("name", ["mix_grpo", "draft"])
def test_a_stage_trains_on_a_reward_of_latents(run, scorer, name, monkeypatch):
    """It moves the policy as the reward of the images does, and nothing is decoded with
    gradient."""
    config = {
        "steps": 1,
        "updates_per_step": 1,
        "algorithm": {"name": name},
        "reference": {"weight": 0},
        "sgd": 0.01,
    }
    policy, before, _, _ = run(judge=scorer, **config)
    wanted = torch.cat([(policy.parameters[n] - before[n]).flatten() for n in before])

    def decode(self, latents):
        assert not latents.requires_grad
        return PIXELS(self, latents)

    monkeypatch.setattr(GlyphModel, "decode_with_gradient", decode)
    policy, before, (logged,), record = run(judge=Scorer(((LatentDarkness(), 1.0),)), **config)
    found = torch.cat([(policy.parameters[n] - before[n]).flatten() for n in before])
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.98
    assert logged["reward/scored_share"] == 1
    assert logged["score/darkness"] == pytest.approx(logged["reward/mean"])
