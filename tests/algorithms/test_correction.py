import math

import pytest
import torch
from torch import Tensor, tensor

from ebbflow.algorithms.base import TrajectoryRows
from ebbflow.algorithms.built_in.flow_grpo import FLOW_GRPO, FlowGRPOConfig
from ebbflow.algorithms.correction import (
    MAX_EXPONENT,
    compute_correction,
    compute_correction_metrics,
    compute_diagnostics,
)
from ebbflow.flow.sampler import Transition, compute_log_prob, sample_next_latents
from ebbflow.flow.samplers.flow_sde import SAMPLER as FLOW_SDE
from ebbflow.recipe.choices import CorrectionConfig

DELTA = tensor([[0.001, -0.002, 0.003], [-0.004, 0.0, 0.0005]], dtype=torch.float64)
DIMS = 8
UNITS = {"mean": 1, "sum": DIMS}
NAN = float("nan")


def correction(**keys):
    """Thresholds that never bite, unless a test says so."""
    return CorrectionConfig(**({"low": 1e-12, "high": 1e12} | keys))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("weights", ["truncated", "masked"])
def test_step_weights_are_the_ratios(unit, weights):
    found, keep = compute_correction(
        DELTA, DIMS, correction(unit=unit, weights=weights, level="step")
    )
    assert keep.all()
    torch.testing.assert_close(found, (UNITS[unit] * DELTA).exp())


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("weights", ["truncated", "masked"])
def test_trajectory_weights_are_the_product_of_the_ratios_at_every_step(unit, weights):
    found, _ = compute_correction(
        DELTA, DIMS, correction(unit=unit, weights=weights, level="trajectory")
    )
    torch.testing.assert_close(
        found, (UNITS[unit] * DELTA).exp().prod(1, keepdim=True).expand(2, 3)
    )


def test_truncation_caps_above_and_keeps_every_term():
    ratios = tensor([[0.01, 0.9, 1.1, 1.5, 1.6, 7.0]])
    weights, keep = compute_correction(
        ratios.log(), DIMS, CorrectionConfig(unit="mean", weights="truncated", low=0.5, high=1.5)
    )
    torch.testing.assert_close(weights, tensor([[0.01, 0.9, 1.1, 1.5, 1.5, 1.5]]))
    assert keep.all()
    assert weights.dtype == ratios.dtype


def test_masking_drops_what_lies_outside_and_caps_nothing():
    ratios = tensor([[0.01, 0.49, 0.51, 1.0, 1.49, 1.51]])
    weights, keep = compute_correction(
        ratios.log(), DIMS, CorrectionConfig(unit="mean", weights="masked", low=0.5, high=1.5)
    )
    assert keep.tolist() == [[False, False, True, True, True, False]]
    torch.testing.assert_close(weights, tensor([[0, 0, 0.51, 1.0, 1.49, 0]]))


def test_masked_trajectories_go_as_a_whole():
    delta = tensor([[0.3, 0.3], [0.3, -0.3]])
    weights, keep = compute_correction(
        delta,
        DIMS,
        CorrectionConfig(unit="mean", weights="masked", level="trajectory", low=0.7, high=1.4),
    )
    assert keep.tolist() == [[False, False], [True, True]]
    assert weights.tolist() == [[0, 0], [1, 1]]


def test_no_weights_are_ones_where_nothing_is_rejected():
    weights, keep = compute_correction(
        DELTA, DIMS, CorrectionConfig(unit="mean", weights="none", reject="k1", reject_above=0.0025)
    )
    assert keep.tolist() == [[True, True, False], [False, True, True]]
    assert torch.equal(weights, keep.double())


@pytest.mark.parametrize("weights", ["none", "truncated", "masked"])
@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_normalised_weights_have_mean_one_over_the_kept_terms_and_keep_their_proportions(
    weights, level
):
    keys = {
        "weights": weights,
        "level": level,
        "low": 0.9971,
        "high": 1.0025,
        "reject": "k1",
        "reject_above": 0.0035,
    }
    plain, keep = compute_correction(DELTA, DIMS, CorrectionConfig(unit="mean", **keys))
    normalised, same = compute_correction(
        DELTA, DIMS, CorrectionConfig(unit="mean", **keys, normalise=True)
    )
    assert torch.equal(keep, same)
    assert 0 < keep.sum() < keep.numel()
    assert normalised[keep].mean().item() == pytest.approx(1, abs=1e-12)
    assert (normalised[~keep] == 0).all()
    torch.testing.assert_close(normalised * plain[keep].mean(), plain)


def test_a_batch_that_is_dropped_whole_has_no_weights_and_no_nan():
    weights, keep = compute_correction(
        DELTA + 1, DIMS, CorrectionConfig(unit="mean", weights="masked", normalise=True)
    )
    assert not keep.any()
    assert (weights == 0).all()


# k1 = |x| is .1, .2, .6 in the first sample and .3, .3, .3 in the second: the same sum and mean,
# another largest.
X = tensor([[0.1, -0.2, 0.6], [0.3, -0.3, 0.3]], dtype=torch.float64)
ESTIMATES = {"k1": X.abs(), "k2": X**2 / 2, "k3": X.exp() - 1 - X}
LEVELS = {
    "step": lambda k: k,
    "sequence_mean": lambda k: k.mean(1, keepdim=True).expand(2, 3),
    "sequence_sum": lambda k: k.sum(1, keepdim=True).expand(2, 3),
    "sequence_max": lambda k: k.max(1, keepdim=True).values.expand(2, 3),
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", ESTIMATES)
@pytest.mark.parametrize("level", LEVELS)
def test_rejection_at_every_threshold_between_the_estimates(unit, kind, level):
    estimate = LEVELS[level](ESTIMATES[kind])
    levels = estimate.unique()
    thresholds = [levels[0] * 0.99, *((levels[:-1] + levels[1:]) / 2), levels[-1] * 1.01]
    for threshold in thresholds:
        config = CorrectionConfig(
            mode="bypass",
            weights="none",
            unit=unit,
            reject=kind,
            reject_level=level,
            reject_above=float(threshold),
        )
        _, keep = compute_correction(X / UNITS[unit], DIMS, config)
        assert torch.equal(keep, estimate <= threshold)


@pytest.mark.parametrize(
    ("level", "keep"),
    [
        ("step", [[True, True, False], [True, True, True]]),
        ("sequence_mean", [[True] * 3, [True] * 3]),
        ("sequence_sum", [[False] * 3, [False] * 3]),
        ("sequence_max", [[False] * 3, [True] * 3]),
    ],
)
def test_rejection_levels_by_hand(level, keep):
    config = CorrectionConfig(
        unit="mean", weights="none", reject="k1", reject_level=level, reject_above=0.5
    )
    assert compute_correction(X, DIMS, config)[1].tolist() == keep


def test_rejection_and_masking_drop_together():
    config = CorrectionConfig(
        unit="mean", weights="masked", low=0.8, high=1.7, reject="k1", reject_above=0.5
    )
    _, keep = compute_correction(
        X, DIMS, config
    )  # exp(.6) = 1.82 and exp(-.3) = .74 lie outside; |.6| is above
    assert keep.tolist() == [[True, True, False], [True, False, True]]
    metrics = compute_correction_metrics(X, DIMS, config)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"rollout/clipped_up": 1 / 6, "rollout/clipped_down": 1 / 6, "rollout/rejected": 1 / 6}
    )


@pytest.mark.parametrize(
    ("weights", "up", "down"), [("none", 0, 0), ("truncated", 1 / 6, 0), ("masked", 1 / 6, 1 / 6)]
)
def test_metrics_count_what_the_weights_do(weights, up, down):
    metrics = compute_correction_metrics(
        X, DIMS, CorrectionConfig(unit="mean", weights=weights, low=0.8, high=1.7)
    )
    assert metrics["rollout/clipped_up"].item() == pytest.approx(up)
    assert metrics["rollout/clipped_down"].item() == pytest.approx(down)
    assert metrics["rollout/rejected"] == 0


EVERY = [
    {"unit": unit, "weights": weights, "level": level, "reject": reject, "normalise": normalise}
    for unit in UNITS
    for weights in ("none", "truncated", "masked")
    for level in ("step", "trajectory")
    for reject in ("none", "k1", "k2", "k3")
    for normalise in (False, True)
]


@pytest.mark.parametrize("keys", EVERY, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_same_policy_needs_no_correction(keys):
    delta = torch.zeros(4, 3)
    config = CorrectionConfig(**keys)
    weights, keep = compute_correction(delta, 512, config)
    assert torch.equal(weights, torch.ones(4, 3))
    assert keep.all()
    assert not any(compute_correction_metrics(delta, 512, config).values())


def test_diagnostics_of_the_same_policy():
    found = compute_diagnostics(torch.zeros(4, 2), tensor([1, 3]), 512)
    assert {name for name, value in found.items() if value != 0} == {
        "rollout/ratio_mean",
        "rollout/ratio_max",
    }
    assert found["rollout/ratio_mean"] == found["rollout/ratio_max"] == 1


def test_correction_diagnostics_equal_values_by_hand():
    half = math.log(2)
    found = {
        name: value.item()
        for name, value in compute_diagnostics(
            tensor([[half, 0.0], [-half, 0.0]]), tensor([2, 5]), dims=2
        ).items()
    }
    assert found == pytest.approx(
        {
            "rollout/delta_mean": half / 2,
            "rollout/delta_max": half,
            "rollout/delta_step_2": half,
            "rollout/delta_step_5": 0,
            "rollout/k3": (1 - half + half - 0.5) / 4,
            "rollout/chi2": (4 + 0.25 + 2) / 4 - 1,
            "rollout/chi2_sum": (16 + 1 / 16 + 2) / 4 - 1,
            "rollout/ratio_mean": (2 + 0.5 + 2) / 4,
            "rollout/ratio_max": 2,
        }
    )


def test_k3_of_tiny_deltas_does_not_cancel():
    found = compute_diagnostics(torch.full((3, 1), 1e-6), tensor([0]), 512)["rollout/k3"]
    assert found.item() == pytest.approx(5e-13, rel=1e-4)


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_policies_worlds_apart_overflow_nothing(level):
    delta = tensor([[1e30, 1e30], [-1e30, -1e30]])
    config = correction(level=level, unit="sum", normalise=True, reject="k3", reject_above=1e38)
    weights, keep = compute_correction(delta, 512, config)
    assert keep.all()
    assert weights.isfinite().all()
    assert weights[0, 0] / weights[1, 0] == pytest.approx(math.exp(2 * MAX_EXPONENT), rel=1e-5)
    assert all(
        value.isfinite() for value in compute_diagnostics(delta, tensor([0, 1]), 512).values()
    )


@pytest.mark.parametrize("weights", ["truncated", "masked"])
def test_a_delta_that_is_not_a_number_is_not_dropped_in_silence(weights):
    found, keep = compute_correction(
        tensor([[NAN, 0.0]]), 512, CorrectionConfig(unit="mean", weights=weights, reject="k1")
    )
    assert keep.all()
    assert found[0, 0].isnan()


def test_weights_are_constants_of_the_loss():
    delta = DELTA.clone().requires_grad_()
    weights, _ = compute_correction(delta, DIMS, correction(normalise=True))
    assert not weights.requires_grad
    assert not any(
        value.requires_grad
        for value in compute_diagnostics(delta, tensor([0, 1, 2]), DIMS).values()
    )


def gaussian_delta(samples: int, dims: int, kappa: float) -> Tensor:
    """delta of rollouts whose policy is off by |mu_train - mu_rollout|^2 = kappa b^2, float64
    [samples, 1].
    """
    draw = torch.Generator().manual_seed(0)
    std = tensor(0.7, dtype=torch.float64)
    nothing = tensor(0.0)
    rollout = Transition(
        FLOW_SDE, torch.randn(1, dims, generator=draw, dtype=torch.float64), std, nothing, nothing
    )
    shift = torch.randn(1, dims, generator=draw, dtype=torch.float64)
    train = Transition(
        FLOW_SDE,
        rollout.mean + shift / shift.norm() * std * math.sqrt(kappa),
        std,
        nothing,
        nothing,
    )
    latents = sample_next_latents(
        rollout, torch.randn(samples, dims, generator=draw, dtype=torch.float64)
    )
    return (compute_log_prob(train, latents) - compute_log_prob(rollout, latents))[:, None]


@pytest.mark.parametrize("dims", [2, 16])
def test_only_weights_of_the_sum_unit_are_ratios_of_densities(dims):
    kappa = 0.5
    delta = gaussian_delta(40_000, dims, kappa)
    for unit, expected in (("sum", 1.0), ("mean", math.exp(-kappa * (1 - 1 / dims) / (2 * dims)))):
        weights, _ = compute_correction(delta, dims, correction(unit=unit))
        standard_error = weights.std() / math.sqrt(len(weights))
        assert abs(weights.mean() - expected) < 4 * standard_error
        assert 4 * standard_error < 0.02


def test_chi2_of_the_sum_unit_is_the_divergence_and_that_of_the_mean_unit_is_not():
    kappa = 0.1
    dims = 16
    delta = gaussian_delta(40_000, dims, kappa)
    found = compute_diagnostics(delta, tensor([0]), dims)
    standard_error = (2 * dims * delta).exp().std() / math.sqrt(len(delta))
    assert abs(found["rollout/chi2_sum"] - math.expm1(kappa)) < 4 * standard_error
    assert found["rollout/chi2"] < 0


@pytest.mark.parametrize(("unit", "band"), [("mean", 5e-4), ("sum", 5e-4 * 512)])
def test_a_band_bites_as_often_as_the_gaussian_tail_says(unit, band):
    # kappa of a bf16 rollout: E|delta| = 1.5e-4 at D = 512.
    dims = 512
    deviation = 1.5e-4 * math.sqrt(math.pi / 2)
    delta = gaussian_delta(10_000, dims, (dims * deviation) ** 2)
    assert compute_diagnostics(delta, tensor([0]), dims)[
        "rollout/delta_mean"
    ].item() == pytest.approx(1.5e-4, rel=0.05)
    config = CorrectionConfig(unit=unit, weights="masked", low=math.exp(-band), high=math.exp(band))
    dropped = (~compute_correction(delta, dims, config)[1]).double().mean().item()
    expected = math.erfc(5e-4 / deviation / math.sqrt(2))
    assert abs(dropped - expected) < 4 * math.sqrt(expected / len(delta))


# What a correction is worth: x = d_1 + ... + d_W with steps d ~ N(theta, b^2 I), R = scale exp(w
# x), rolled out at theta = 0.

STEPS = 2
ELEMENTS = 3
STD = 1.0
DIRECTION = 0.5 * tensor([2.0, 1.0, 2.0], dtype=torch.float64) / 3
SHIFT = -0.0582 * DIRECTION / DIRECTION.norm()
SCALE = 0.179
UNCORRECTED = {}
BYPASS = {"mode": "bypass"}
STEP = {"level": "step"}
TRAJECTORY = {"level": "trajectory"}


def expected_gradient(own: float, other: float) -> float:
    """d E[R] / d theta along w at theta = SHIFT, by rollouts that are weighted with the ratio of a
    term's own step to the power ``own`` and those of the others to the power ``other``; (1, 1) is
    the true one. The baseline is the mean of the rollouts.
    """
    powers = [own] + [other] * (STEPS - 1)
    gap = SHIFT @ SHIFT / STD**2
    weight = math.prod(math.exp(power * (power - 1) * gap / 2) for power in powers)
    baseline = SCALE * math.exp(STEPS * (STD * DIRECTION.norm()) ** 2 / 2)
    reward = baseline * weight * math.exp(sum(powers) * (DIRECTION @ SHIFT))
    term = reward * DIRECTION + (reward - baseline * weight) * (own - 1) * SHIFT / STD**2
    return float(STEPS * term @ DIRECTION / DIRECTION.norm())


def found_gradients(correction: dict[str, object]) -> Tensor:
    """The same by the loss of Flow-GRPO with a correction, of each of the same samples."""
    count = 400_000
    moves = STD * torch.randn(
        count, STEPS, ELEMENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    reward = SCALE * (moves.sum(1) @ DIRECTION).exp()
    nothing = tensor(0.0)
    theta = SHIFT.expand(count * STEPS, ELEMENTS).clone().requires_grad_()
    train = Transition(FLOW_SDE, theta, tensor(STD, dtype=torch.float64), nothing, nothing)
    rollout = Transition(FLOW_SDE, torch.zeros_like(theta), train.std, nothing, nothing)
    score, old = (compute_log_prob(step, moves.flatten(0, 1)) for step in (train, rollout))
    weights = torch.ones(count, STEPS, dtype=torch.float64)
    if correction not in (UNCORRECTED, BYPASS):
        config = CorrectionConfig(unit="sum", low=1e-12, high=1e12, **correction)
        weights, _ = compute_correction((score - old).detach().view(count, STEPS), ELEMENTS, config)
    against = old if correction == BYPASS else score.detach()
    advantage = (reward - reward.mean()).repeat_interleave(STEPS)
    rows = TrajectoryRows(train, score, rollout.mean, against, {}, advantage)
    loss = FLOW_GRPO.loss(rows, FlowGRPOConfig(clip_range=0.99))[0] * weights.flatten()
    (gradient,) = torch.autograd.grad(-loss.sum() * ELEMENTS, theta)
    return (gradient.view(count, STEPS, ELEMENTS).sum(1) @ DIRECTION) / DIRECTION.norm()


@pytest.mark.parametrize(
    ("correction", "powers", "gradient"),
    [
        (UNCORRECTED, (0, 0), 0.2298),
        (BYPASS, (1 / ELEMENTS, 0), 0.2274),
        (STEP, (1, 0), 0.2232),
        (TRAJECTORY, (1, 1), 0.2168),
    ],
    ids=["uncorrected", "bypass", "step", "trajectory"],
)
def test_only_trajectory_weights_of_the_sum_unit_give_the_true_gradient(
    correction, powers, gradient
):
    """The ratio of a step's mean log-probs is the true one to the power 1 / D, and knows nothing of
    the other steps: bypass goes 1 / (D W) of the way.
    """
    assert expected_gradient(*powers) == pytest.approx(gradient, abs=5e-4)
    uncorrected = found_gradients(UNCORRECTED)
    found = found_gradients(correction)
    assert (
        abs(uncorrected.mean() - 0.2298)
        < 4 * uncorrected.std() / math.sqrt(len(uncorrected))
        < 0.004
    )
    change = found - uncorrected  # of the same samples, so most of the noise cancels
    standard_error = change.std() / math.sqrt(len(change))
    assert (
        abs(change.mean() - (expected_gradient(*powers) - expected_gradient(0, 0)))
        <= 4 * standard_error
    )
    assert standard_error < 3e-4
