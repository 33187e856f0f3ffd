"""What the updates of a step train on: whole groups, their noise, trees and pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loop_cases import NFT, collect, keys_of

from ebbflow.flow.windows import Plan
from ebbflow.models import load_model
from ebbflow.rollouts.generate import generate_samples
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.parameters import changed


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

    def watch(updater, batch, passes, prompt_sets, num_repeats):
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
