"""From samples to rows: every row belongs to its sample, groups stay whole, and a sample's draws
are its own.
"""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_cases import (
    ALONE,
    GROUPS,
    PAIRS,
    TEXTS,
    forward_rows,
    rollout,
    samples,
    schedule_of,
    stage_of,
    trajectory_rows,
)

from ebbflow.flow.noise import SampleKeys
from ebbflow.seeding import Stream, make_generator
from ebbflow.training.batches import (
    build_forward_batch,
    build_trajectory_batch,
    count_micro_batches,
    split_into_passes,
)

STAGE = stage_of("mix_grpo", sampler={"steps": 5})


def test_a_window_becomes_a_term_for_each_sample_and_step(model):
    trajectory, conditioning, keys = rollout(model, STAGE.sampler, (0, 2))
    batch = build_trajectory_batch(
        trajectory,
        conditioning,
        torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        keys,
        STAGE.sampler,
        rows=np.array([4, 5, 0, 1]),  # both steps of sample 2, then of sample 0
    )
    assert batch.advantage.tolist() == [3, 3, 1, 1]
    assert batch.steps.tolist() == [0, 2, 0, 2]
    assert batch.weight.tolist() == [1, 1, 1, 1]
    assert batch.group_index.tolist() == [0, 1, 2, 3]
    assert torch.equal(batch.inputs.sigma, model.compute_sigmas(5)[[0, 2, 0, 2]])
    for row, (sample, index) in enumerate([(2, 0), (2, 1), (0, 0), (0, 1)]):
        assert torch.equal(batch.inputs.latents[row], trajectory.latents[sample, index])
        assert torch.equal(batch.next_latents[row], trajectory.next_latents[sample, index])
        assert torch.equal(batch.old_mean[row], trajectory.means[sample, index])
        assert torch.equal(batch.old_log_prob[row], trajectory.log_probs[sample, index])
        assert torch.equal(
            batch.inputs.model_arguments(slice(row, row + 1))[2]["embeds"][0],
            conditioning["embeds"][sample],
        )
    assert (
        batch.describe_row(1)
        == f"prompt 2, sample 7, denoising step 2 (sigma {model.compute_sigmas(5)[2].item():.4f})"
    )


def test_terms_that_the_correction_rejects_are_not_there(model):
    trajectory, conditioning, keys = rollout(model, STAGE.sampler, (0, 2))
    keep = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 0], [1, 0], [1, 1]]).bool()
    weight = torch.arange(12.0).view(6, 2)
    corrected = dataclasses.replace(trajectory, keep=keep, weight=weight)
    advantage = torch.arange(6.0)
    batch = build_trajectory_batch(corrected, conditioning, advantage, keys, STAGE.sampler)
    assert batch.weight.tolist() == [0, 1, 3, 4, 5, 8, 10, 11]
    assert batch.advantage.tolist() == [0, 0, 1, 2, 2, 4, 5, 5]
    assert list(batch.keys.prompt_ids) == [0, 0, 1, 2, 2, 4, 5, 5]
    assert batch.steps.tolist() == [0, 2, 2, 0, 2, 0, 0, 2]
    assert torch.equal(batch.inputs.latents, trajectory.latents.flatten(0, 1)[keep.flatten()])
    assert torch.equal(batch.inputs.sigma, trajectory.sigmas[batch.steps])


def test_the_terms_of_a_part_are_those_rows_of_the_whole(model):
    """With the rollout's own velocities the mean is the recorded one, at every step."""
    batch = trajectory_rows(model, STAGE)
    with torch.no_grad():
        velocity = model.predict_velocity(*batch.inputs.model_arguments(slice(None)))
    part = slice(4, 9)
    rows = batch.build_rows(part, velocity[part], {"teacher": velocity[part]})
    assert (rows.transition.mean - batch.old_mean[part]).abs().max() < 1e-5
    assert (rows.log_prob - batch.old_log_prob[part]).abs().max() < 1e-6
    assert torch.equal(rows.copies["teacher"].mean, rows.transition.mean)
    assert rows.transition.std.shape == rows.transition.dt.shape == (5,)


def test_forward_terms_are_stratified_and_belong_to_their_sample(model):
    clean, conditioning, _, keys = samples(model)
    advantage = torch.arange(6.0)
    stage = stage_of({"name": "sft", "noise_levels": 3, "sigma": {"kind": "uniform"}})
    schedule = schedule_of(model, stage)
    batch = build_forward_batch(
        clean, conditioning, advantage, keys, ALONE, stage.hyper_parameters, schedule, visit=0
    )
    sigma = batch.inputs.sigma.view(6, 3)  # the draws of a sample are adjacent
    for draw in range(3):
        assert ((sigma[:, draw] >= draw / 3) & (sigma[:, draw] <= (draw + 1) / 3)).all()
    share = batch.inputs.sigma.view(-1, 1, 1, 1)
    assert torch.allclose(batch.inputs.latents, (1 - share) * batch.clean + share * batch.noise)
    for row in range(18):
        assert torch.equal(batch.clean[row], clean[row // 3])
        assert batch.advantage[row] == row // 3
        assert batch.keys.prompt_ids[row] == row // 3
        assert torch.equal(
            batch.inputs.model_arguments(slice(row, row + 1))[2]["pooled"][0],
            conditioning["pooled"][row // 3],
        )
    assert len({tuple(row.flatten()[:4].tolist()) for row in batch.noise}) == 18
    assert batch.group_index.tolist() == list(range(18))
    assert batch.weight.tolist() == [1.0] * 18
    later = build_forward_batch(
        clean, conditioning, advantage, keys, ALONE, stage.hyper_parameters, schedule, visit=1
    )
    assert not (later.noise == batch.noise).flatten(1).all(1).any()
    # A sample's draws are its own: they do not depend on who else is in the batch.
    alone = build_forward_batch(
        *(of[4:5] for of in (clean,)),
        conditioning.select_rows(slice(4, 5)),
        advantage[4:5],
        keys.select_samples(slice(4, 5)),
        ALONE[:1],
        stage.hyper_parameters,
        schedule,
        visit=0,
    )
    assert torch.equal(alone.noise, batch.noise[12:15])
    assert torch.equal(alone.inputs.sigma, batch.inputs.sigma[12:15])
    assert (
        batch.describe_row(13)
        == f"prompt 4, sample 7, noised to sigma {batch.inputs.sigma[13].item():.4f}"
    )


@pytest.mark.parametrize("group_index", [PAIRS, GROUPS], ids=["pairs", "groups"])
def test_a_unit_shares_sigma_and_noise_and_stays_together(model, group_index):
    batch = forward_rows(model, stage_of({"name": "dgpo", "noise_levels": 2}), group_index)
    assert len(batch.group_index) == 12
    assert (batch.group_index.diff() >= 0).all()
    assert len(batch.group_index.unique()) == 2 * len(set(group_index))
    for number in batch.group_index.unique():
        members = (batch.group_index == number).nonzero().flatten()
        assert len({batch.inputs.sigma[row].item() for row in members}) == 1
        assert all(torch.equal(batch.noise[row], batch.noise[members[0]]) for row in members)
        assert len({group_index[batch.keys.prompt_ids[row]] for row in members}) == 1
        assert (
            len({batch.keys.prompt_ids[row] for row in members})
            == len(members)
            == (group_index == group_index[batch.keys.prompt_ids[members[0]]]).sum()
        )
    starts = batch.group_index.unique(return_counts=True)[1].cumsum(0) - 1
    assert len({tuple(batch.noise[row].flatten()[:4].tolist()) for row in starts}) == len(starts)


def test_samples_of_a_group_can_have_noise_of_their_own(model):
    keys = {"noise_levels": 2, "sigma": {"kind": "uniform"}}
    shared, own = (
        forward_rows(model, stage_of({"name": name, **keys}), GROUPS) for name in ("dgpo", "crd")
    )
    assert torch.equal(own.inputs.sigma, shared.inputs.sigma)
    assert torch.equal(own.group_index, shared.group_index)
    assert len({tuple(noise.flatten()[:4].tolist()) for noise in own.noise}) == len(own.noise) == 12
    by_itself = forward_rows(model, stage_of({"name": "awm", "noise_levels": 2}))
    rows = {(sample, draw): noise for sample, draw, noise in numbered(by_itself)}
    assert all(torch.equal(noise, rows[sample, draw]) for sample, draw, noise in numbered(own))


def numbered(batch):
    """(sample, number of its draw, noise) of each row."""
    return [
        (sample, int(group) % 2, noise)
        for sample, group, noise in zip(
            batch.keys.prompt_ids, batch.group_index, batch.noise, strict=True
        )
    ]


@pytest.mark.parametrize("name", ["dgpo", "crd"])
def test_a_unit_draws_the_same_alone(model, name):
    stage = stage_of({"name": name, "noise_levels": 2})
    whole = forward_rows(model, stage, GROUPS)
    last = forward_rows(model, stage, GROUPS, 3, 6)
    rows = [row for row in range(12) if whole.keys.prompt_ids[row] >= 3]
    assert torch.equal(last.noise, whole.noise[rows])
    assert torch.equal(last.inputs.sigma, whole.inputs.sigma[rows])


def test_logit_normal_sigmas_are_stratified_in_their_own_distribution(model):
    count = 400
    draws = 4
    stage = stage_of(
        {"name": "diffusion_dpo", "noise_levels": draws, "sigma": {"kind": "logit_normal"}}
    )
    keys = SampleKeys(1, list(range(count)), [0] * count)
    clean = torch.zeros(count, 1, 1, 1)
    conditioning = model.encode_texts(TEXTS[:1]).select_rows(torch.zeros(count, dtype=torch.long))
    advantage = torch.zeros(count)
    schedule = schedule_of(model, stage)
    batch = build_forward_batch(
        clean,
        conditioning,
        advantage,
        keys,
        np.arange(count),
        stage.hyper_parameters,
        schedule,
        visit=0,
    )
    logit = torch.logit(batch.inputs.sigma.double())
    quantile = torch.special.ndtr(logit).view(count, draws)
    for draw in range(draws):
        assert (
            (quantile[:, draw] >= draw / draws - 1e-5)
            & (quantile[:, draw] <= (draw + 1) / draws + 1e-5)
        ).all()
    # Stratified draws of N(0, 1): closer to it than independent ones, whose mean would be off by 1
    # / 40.
    assert logit.mean().item() == pytest.approx(0, abs=0.05)
    assert logit.std().item() == pytest.approx(1, abs=0.05)
    assert logit.median().item() == pytest.approx(NormalDist().inv_cdf(0.5), abs=0.05)


def test_sigma_and_noise_are_the_first_numbers_of_the_samples_own_generator(model):
    """Which keeps the draws of a recipe the same for good."""
    stage = stage_of({"name": "sft", "noise_levels": 3, "sigma": {"kind": "uniform"}})
    *_, keys = samples(model)
    batch = build_forward_batch(
        *samples(model), ALONE, stage.hyper_parameters, schedule_of(model, stage), visit=2
    )
    for row in range(18):
        sample, draw = divmod(row, 3)
        own = make_generator(
            keys.seed, keys.prompt_ids[sample], keys.samples[sample], 2 * 3 + draw, Stream.TRAINING
        )
        expected = (np.float32(draw) + own.random(dtype=np.float32)) / np.float32(3)
        assert batch.inputs.sigma[row].item() == expected.item()
        assert np.array_equal(
            batch.noise[row].numpy(), own.standard_normal(model.latent_shape, dtype=np.float32)
        )


@pytest.mark.parametrize("group_index", [ALONE, GROUPS], ids=["alone", "groups"])
def test_sigmas_of_the_schedule_are_those_of_the_stages_sampler(model, group_index):
    stage = stage_of(
        {"name": "diffusion_nft", "noise_levels": 4}, sampler={"name": "ode", "steps": 5}
    )
    batch = forward_rows(model, stage, group_index)
    for sample in range(6):
        drawn = batch.inputs.sigma[[prompt_id == sample for prompt_id in batch.keys.prompt_ids]]
        assert len(drawn.unique()) == 4
        assert torch.isin(drawn, model.compute_sigmas(5)[:-1]).all()


groups = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def as_units(sizes):
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


@given(groups, st.data())
def test_parts_cover_every_row_once_and_tear_no_unit(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    group_index = as_units(sizes)
    found = split_into_passes(group_index, count)
    assert len(found) == count
    assert [row for part in found for row in range(len(group_index))[part]] == list(
        range(len(group_index))
    )
    units_of = [set(group_index[part].tolist()) for part in found]
    assert all(units_of)
    assert sum(map(len, units_of)) == len(sizes)
    assert max(map(len, units_of)) - min(map(len, units_of)) <= 1


@given(groups, st.integers(1, 30))
def test_micro_batches_hold_at_most_their_size(sizes, size):
    group_index = as_units(sizes)
    count = count_micro_batches(group_index, size)
    assert 1 <= count <= len(sizes)
    assert count == math.ceil(len(sizes) / max(1, size // max(sizes)))
    assert all(
        len(range(len(group_index))[part]) <= max(size, *sizes)
        for part in split_into_passes(group_index, count)
    )


@pytest.mark.parametrize(("size", "expected"), [(1, 6), (4, 2), (6, 1), (100, 1)])
def test_single_terms_take_no_more_passes_than_they_need(size, expected):
    assert count_micro_batches(torch.arange(6), size) == expected
