"""The sigmas of forward-process losses: published choices by their moments, and draws that depend
on their keys alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbflow.algorithms.built_in.awm import AWMConfig
from ebbflow.algorithms.built_in.crd import CRDConfig
from ebbflow.algorithms.built_in.dgpo import DGPOConfig
from ebbflow.algorithms.built_in.diffusion_dpo import DiffusionDPOConfig
from ebbflow.algorithms.built_in.diffusion_nft import DiffusionNFTConfig
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.training_sigmas import list_schedule_points, sample_training_sigmas
from ebbflow.recipe.algorithms import SigmaConfig

SAMPLES = 2000


def sd3(steps):
    """The schedule of Stable Diffusion 3 as diffusers makes it, [steps + 1]."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.clone()


def keys_of(samples, first=0):
    return SampleKeys(3, list(range(first, first + samples)), [5] * samples)


def draw(config, draws, schedule, samples=SAMPLES, visit=0, keys=None):
    """Sigmas [draws, samples] from independent uniform numbers."""
    uniform = torch.from_numpy(np.random.default_rng(0).random((draws, samples), dtype=np.float32))
    return sample_training_sigmas(config, schedule, keys or keys_of(samples), visit, uniform)


@pytest.mark.parametrize(
    ("algorithm", "steps", "draws", "mean", "low", "high"),
    [
        # DiffusionNFT: 9 of the sampler's 10 sigmas, in a random order of every sample's own
        (DiffusionNFTConfig, 10, 9, 0.658, 0.0089, 1.0),
        # AWM: one of each of 6 runs of the sampler's 14 sigmas without the first and the last two
        (AWMConfig, 14, 6, 0.755, 0.3574, 0.9731),
        # DGPO on GenEval: 4 of the first 5 of 10
        (DGPOConfig, 10, 4, 0.904, 0.7904, 1.0),
        # CRD: one of each of 20 runs of the sampler's 10 sigmas without the last
        (CRDConfig, 10, 20, 0.747, 0.2780, 1.0),
    ],
)
def test_published_grids_have_their_published_moments(algorithm, steps, draws, mean, low, high):
    sigmas = draw(algorithm().sigma, draws, sd3(steps))
    assert sigmas.mean().item() == pytest.approx(mean, abs=0.003)
    assert (sigmas.min().item(), sigmas.max().item()) == pytest.approx((low, high), abs=1e-4)
    assert set(sigmas.unique().tolist()) <= set(sd3(steps).tolist())


def test_the_published_pairs_of_dpo_are_noised_to_a_shifted_logit_normal():
    sigmas = draw(DiffusionDPOConfig().sigma, 4, sd3(40))
    assert sigmas.mean().item() == pytest.approx(0.714, abs=0.002)
    logit = torch.logit(sigmas.double())  # a shift by k adds log k to the logit
    assert logit.mean().item() == pytest.approx(np.log(3), abs=0.02)
    assert logit.std().item() == pytest.approx(1, abs=0.02)


def test_awm_weighs_the_first_of_its_sigmas_twice():
    """Published code: runs of the indices 1 to 11 that begin at floor(linspace(1, 12, 7)), a
    uniform index of each.
    """
    sigmas = draw(AWMConfig().sigma, 6, sd3(14))
    points = sd3(14)
    shares = [(sigmas == point).float().mean().item() for point in points[:-1]]
    assert shares == pytest.approx([0, 1 / 6, *[1 / 12] * 10, 0, 0], abs=0.01)
    runs = [set(row.unique().tolist()) for row in sigmas]
    assert [len(run) for run in runs] == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("draws", [4, 9, 10, 25])
def test_unstratified_points_of_a_schedule_are_drawn_without_replacement(draws):
    schedule = sd3(10)
    for sample in draw(
        SigmaConfig(kind="schedule", stratified=False), draws, schedule, samples=50
    ).T:
        counts = [int((sample == point).sum()) for point in schedule[:-1]]
        assert sum(counts) == draws
        assert max(counts) - min(counts) <= 1


def test_every_order_of_a_schedule_is_the_samples_own():
    sigmas = draw(SigmaConfig(kind="schedule", stratified=False), 9, sd3(10), samples=200)
    assert len({tuple(sample.tolist()) for sample in sigmas.T}) == 200


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("kind", ["uniform", "logit_normal", "schedule"])
def test_draws_depend_on_the_sample_and_the_visit_alone(kind, stratified):
    config = SigmaConfig(kind=kind, stratified=stratified)
    schedule = sd3(10)
    uniform = torch.rand(3, 6, generator=torch.Generator().manual_seed(0))
    whole = sample_training_sigmas(config, schedule, keys_of(6), 2, uniform)
    assert torch.equal(sample_training_sigmas(config, schedule, keys_of(6), 2, uniform), whole)
    alone = sample_training_sigmas(config, schedule, keys_of(1, first=4), 2, uniform[:, 4:5])
    assert torch.equal(alone[:, 0], whole[:, 4])


def test_another_visit_has_another_order():
    config = SigmaConfig(kind="schedule", stratified=False)
    schedule = sd3(10)
    uniform = torch.zeros(9, 1)
    orders = {
        tuple(sample_training_sigmas(config, schedule, keys_of(1), visit, uniform)[:, 0].tolist())
        for visit in range(20)
    }
    assert len(orders) == 20


@pytest.mark.parametrize(
    ("kind", "shift"),
    [("uniform", 1.0), ("uniform", 3.0), ("logit_normal", 1.0), ("logit_normal", 3.0)],
)
def test_a_band_is_the_distribution_given_that_sigma_lies_in_it(kind, shift):
    config = SigmaConfig(kind=kind, shift=shift, min=0.3, max=0.8)
    narrow = draw(config, 4, sd3(10)).flatten().sort().values
    wide = draw(SigmaConfig(kind=kind, shift=shift), 40, sd3(10)).flatten()
    inside = wide[(wide >= 0.3) & (wide <= 0.8)]
    assert 0.3 <= narrow[0] < 0.31
    assert 0.79 < narrow[-1] <= 0.8 + 1e-6
    quantiles = torch.linspace(0.1, 0.9, 9)
    assert torch.allclose(narrow.quantile(quantiles), inside.quantile(quantiles), atol=0.01)


def test_stratified_draws_take_equal_parts_and_others_the_whole():
    uniform = torch.rand(4, 500, generator=torch.Generator().manual_seed(0))
    parts = sample_training_sigmas(SigmaConfig(kind="uniform"), sd3(10), keys_of(500), 0, uniform)
    assert torch.equal(parts, (torch.arange(4)[:, None] + uniform) / 4)
    assert torch.equal(
        sample_training_sigmas(
            SigmaConfig(kind="uniform", stratified=False), sd3(10), keys_of(500), 0, uniform
        ),
        uniform,
    )


@given(
    steps=st.integers(2, 30),
    draws=st.integers(1, 40),
    stratified=st.booleans(),
    low=st.floats(0, 0.9),
)
def test_every_schedule_gives_points_of_its_band(steps, draws, stratified, low):
    config = SigmaConfig(kind="schedule", min=low, stratified=stratified)
    sigmas = draw(config, draws, sd3(steps), samples=3)
    assert sigmas.shape == (draws, 3)
    assert bool(torch.isin(sigmas, list_schedule_points(config, sd3(steps))).all())
    assert sigmas.min() >= low
    assert sigmas.min() > 0


def test_a_band_without_a_point_names_the_schedule_and_the_ways_out():
    with pytest.raises(
        ValueError, match=r"schedule \(1, 0\.858, 0\.602, .*min = 0\.91.*max = 0\.95.*steps"
    ):
        list_schedule_points(SigmaConfig(kind="schedule", min=0.91, max=0.95), sd3(4))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "Field required"),
        ({"kind": "normal"}, "'uniform', 'logit_normal' or 'schedule'"),
        ({"kind": "uniform", "min": 0.8, "max": 0.5}, "min = 0.8 is not below max = 0.5"),
        ({"kind": "schedule", "shift": 3}, "leave shift out, or take kind uniform or logit_normal"),
        ({"kind": "uniform", "shift": 0}, "greater than 0"),
    ],
)
def test_what_cannot_work_is_rejected(keys, reason):
    with pytest.raises(ValidationError, match=reason):
        SigmaConfig.model_validate(keys)
