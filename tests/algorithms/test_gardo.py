"""GARDO: which samples the reference penalty is for, and how diversity reshapes advantages, against
values worked out by hand and the published lines in other words.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_rows import kl_per_element, moved, rollout

from ebbflow.algorithms.advantages import AdvantageResult
from ebbflow.algorithms.base import StepScores
from ebbflow.algorithms.built_in.gardo import (
    ALGORITHM,
    GARDOConfig,
    choose_gate,
    compute_diversity_scale,
    compute_uncertainty,
)
from ebbflow.algorithms.loss_terms import compute_penalty
from ebbflow.recipe.choices import ReferenceConfig

ONE_EACH = GARDOConfig(auxiliary=["q"], diversity="d", share=0.2)


def test_uncertainty_is_the_win_rate_of_the_reward_less_the_mean_of_the_others():
    reward = np.array([0.9, 0.5, 0.1, 0.5])
    first = np.array([1.0, 4.0, 3.0, 2.0])
    second = np.array([5.0, 5.0, 6.0, 7.0])
    # Samples below: of the reward 3, 1, 0, 1 (the two halves do not win over each other); of the
    # first other 0, 3, 2, 1; of the second 0, 0, 2, 3. Their means are 0, 1.5, 2, 2.
    np.testing.assert_allclose(
        compute_uncertainty(reward, [first, second]), np.array([3, -0.5, -2, -1]) / 4, atol=1e-15
    )


def test_the_gate_is_for_what_the_reward_overrates_and_not_for_what_it_underrates():
    """Figure 7 of the paper: the gated samples have a high reward and low other scores."""
    reward = np.array([1.0, 0.9, 0.8, 0.1])
    other = np.array([0.1, 0.8, 0.9, 1.0])
    uncertainty = compute_uncertainty(reward, [other])
    limit = choose_gate(uncertainty, ONE_EACH, {})
    assert (uncertainty > limit).tolist() == [True, False, False, False]


def test_the_limit_is_the_quantile_of_the_overrated_samples():
    uncertainty = np.array([-0.9, -0.8, 0.0, 0.1, 0.2, 0.3, 0.4])
    # Of the five that are not negative, numpy's linear quantile at .8 lies at position 3.2.
    assert choose_gate(uncertainty, ONE_EACH, {}) == pytest.approx(0.32)
    assert choose_gate(np.array([-0.5, -0.1]), ONE_EACH, {}) == np.inf


def test_the_share_follows_the_uncertainty_within_its_bounds():
    config = GARDOConfig(auxiliary=["q"], share=0.1, min_share=0.09, max_share=0.115)
    memory: dict[str, object] = {}
    shares = []
    #       first, above, between, below, below, above, above
    for mean in (0.2, 0.3, 0.25, 0.1, 0.05, 0.4, 0.5):
        choose_gate(np.array([mean, mean, -1.0]), config, memory)
        shares.append(memory["share"])
    expected = [0.1, 0.11, 0.11, 0.099, 0.09, 0.099, 0.1089]
    assert shares == pytest.approx(expected)
    assert memory["uncertainties"] == pytest.approx([0.2, 0.3, 0.25, 0.1, 0.05, 0.4, 0.5])
    for _ in range(30):
        choose_gate(np.array([0.6]), config, memory)
    assert memory["uncertainties"] == pytest.approx([0.6] * 20)
    choose_gate(np.array([0.7]), config, memory)
    assert memory["share"] == pytest.approx(0.115)


def test_diversity_is_divided_by_its_mean_in_the_group():
    novelty = np.array([0.1, 0.3, 0.2, 0.0, 0.0, np.nan])
    prompts = np.array([4, 4, 4, 9, 9, 9])
    np.testing.assert_allclose(compute_diversity_scale(novelty, prompts), [0.5, 1.5, 1, 1, 1, 1])


def reshape(values, reward, others, novelty, config=ONE_EACH, keep=None, memory=None):
    advantages = AdvantageResult(
        np.array(values, np.float32), np.ones(len(values), bool) if keep is None else keep, {}
    )
    columns = {"q": np.array(others, float), "d": np.array(novelty, float)}
    prompts = np.arange(len(values)) // 4
    scores = StepScores(np.array(reward, float), columns, prompts)
    return ALGORITHM.reshape(advantages, scores, config, {} if memory is None else memory)


def test_only_good_samples_gain_or_lose_by_diversity():
    result = reshape(
        [0.4, 0.2, -0.1, -0.5], [0.9, 0.7, 0.4, 0.0], [4, 3, 2, 1], [0.1, 0.5, 0.5, 0.1]
    )
    # d over its mean .3 is 1/3, 5/3, 5/3, 1/3; the two bad ones stay.
    np.testing.assert_allclose(result.values, [0.4 / 3, 1 / 3, -0.1, -0.5], rtol=1e-6)
    assert result.values.dtype == np.float32
    assert result.metrics["gardo/diversity"] == pytest.approx(0.3)
    unchanged = reshape(
        [0.4, -0.4], [0.9, 0.1], [2, 1], [0.1, 0.5], GARDOConfig(auxiliary=["q"], diversity=None)
    )
    np.testing.assert_array_equal(unchanged.values, np.float32([0.4, -0.4]))


def test_the_penalty_is_the_mean_over_the_gated_samples():
    """Of eight samples one is gated; its factor makes the mean over all rows that over the gated
    ones, whatever the other samples are.
    """
    reward = [8, 7, 6, 5, 4, 3, 2, 1]
    others = [1, 7, 6, 5, 4, 3, 2, 8]
    result = reshape([0.1] * 8, reward, others, [1.0] * 8)
    assert result.penalty_factor.tolist() == [8, 0, 0, 0, 0, 0, 0, 0]
    assert result.metrics["gardo/gated_share"] == 1 / 8
    divergence = np.arange(8.0) + 3
    assert (result.penalty_factor * divergence).mean() == divergence[0]
    dropped = np.array([True] * 6 + [False] * 2)
    kept = reshape([0.1] * 8, reward, others, [1.0] * 8, keep=dropped)
    assert kept.penalty_factor.tolist() == [6, 0, 0, 0, 0, 0, 0, 0]
    untrained = reshape([0.1] * 8, reward, others, [1.0] * 8, keep=np.arange(8) > 0)
    assert not untrained.penalty_factor.any()


def test_a_sample_without_a_score_is_not_gated_and_keeps_its_advantage():
    reward = [8, 7, 6, 5, 4, 3, 2, np.nan]
    others = [np.nan, 1, 6, 5, 4, 3, 7, 8]
    result = reshape([0.3] * 8, reward, others, [np.nan, 2, 1, 1, 1, 1, 1, 1])
    # The first and the last sample are left out of the ranks, so the second leads the reward.
    assert np.flatnonzero(result.penalty_factor).tolist() == [1]
    np.testing.assert_allclose(result.values[:4], [0.3, 0.45, 0.225, 0.225], rtol=1e-6)
    nothing = reshape([0.3], [np.nan], [1.0], [1.0], keep=np.array([False]))
    assert nothing.penalty_factor.tolist() == [0]


def test_a_step_equals_the_published_lines():
    """config/gardo.py and scripts/train_sd3_grpo_gardo.py of tinnerhrhe/GARDO in numpy, with the
    sign of the paper's eq. 7: ranks count from the worst.
    """
    rng = np.random.default_rng(0)
    reward = rng.random(24)
    others = [rng.random(24), rng.random(24)]
    embeddings = rng.normal(size=(24, 5))
    prompts = np.repeat([0, 1, 2], 8)
    config = GARDOConfig(auxiliary=["a", "b"], diversity="d")

    expected = np.zeros(24)
    distances = np.zeros(24)
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for prompt in range(3):
        rows = prompts == prompt
        matrix = 1 - (unit[rows] @ unit[rows].T).clip(-1, 1)
        nearest = np.array([np.delete(matrix[i], i).min() for i in range(8)])
        centred = reward[rows] - reward[rows].mean()
        distances[rows] = nearest
        expected[rows] = centred * np.where(centred < 0, 1, nearest / nearest.mean())
    ranks = [np.argsort(np.argsort(values)) for values in (reward, *others)]
    uncertainty = (ranks[0] - (ranks[1] + ranks[2]) / 2) / 24
    overrated = uncertainty[uncertainty >= 0]
    gate = uncertainty > np.percentile(overrated, 100 - 0.1 * 100)

    centred = np.concatenate([reward[prompts == p] - reward[prompts == p].mean() for p in range(3)])
    advantages = AdvantageResult(centred.astype(np.float32), np.ones(24, bool), {})
    columns = {"a": others[0], "b": others[1], "d": distances}
    result = ALGORITHM.reshape(advantages, StepScores(reward, columns, prompts), config, {})
    np.testing.assert_allclose(result.values, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(result.penalty_factor, gate * 24 / gate.sum(), rtol=1e-6)
    assert gate.any()
    assert result.metrics["gardo/uncertainty"] == pytest.approx(overrated.mean())


def test_the_factor_of_a_row_multiplies_its_kl_to_the_renewed_reference():
    made = rollout(rows=5)
    velocity = moved(made)
    other = made.old + 0.1
    rows = made.rows(velocity, recent=other, reference=made.old - 3)
    factor = torch.tensor([5.0, 0, 0, 0, 0], dtype=torch.float64)
    config = ReferenceConfig(weight=0.04, penalty="kl", reset_every=16)
    plain, _ = compute_penalty(config, rows, velocity, other, config.copy_name)
    torch.testing.assert_close(plain, kl_per_element(rows.transition, rows.copies["recent"]))
    gated_rows = replace(rows, penalty_factor=factor)
    gated, _ = compute_penalty(config, gated_rows, velocity, other, config.copy_name)
    torch.testing.assert_close(gated, factor * plain)
    assert gated[0] > 0


def test_the_loss_is_that_of_flow_grpo():
    made = rollout(rows=5)
    rows = made.rows(moved(made))
    loss, metrics = ALGORITHM.loss(rows, GARDOConfig(clip_range=0.5))
    ratio = (rows.log_prob - rows.old_log_prob).exp()
    clipped = ratio.clamp(0.5, 1.5)
    torch.testing.assert_close(
        loss, torch.maximum(-rows.advantage * ratio, -rows.advantage * clipped)
    )
    assert "ratio/mean" in metrics


def test_shares_out_of_order_are_rejected():
    with pytest.raises(ValueError, match="share = 0.3 is not between min_share = 0.02"):
        GARDOConfig(share=0.3)
