"""BranchGRPO: trees with fused rewards by hand, noise that is shared before a split, and
predictions that are made once.
"""

import math

import numpy as np
import pytest
import torch

from ebbflow.algorithms.advantages import compute_advantages, compute_tree_advantages
from ebbflow.algorithms.built_in.branch_grpo import BranchGRPOConfig
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan, plan_steps
from ebbflow.recipe.choices import AdvantagesConfig, SamplerConfig, TreeConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples

GROUP = AdvantagesConfig(std="group")
FOUR = np.array([[0, 0, 0], [0, 0, 1], [0, 2, 2], [0, 2, 3]])
"""A tree of four leaves: the nodes after a step before the first split, after the first and after
the second.
"""
SDE = SamplerConfig(name="dance_sde", steps=6)


def advantages(rewards, nodes=FOUR, prompt_ids=None, config=GROUP):
    prompt_ids = np.zeros(len(nodes), int) if prompt_ids is None else np.array(prompt_ids)
    return compute_tree_advantages(
        {"r": np.array(rewards, float)}, {"r": 1.0}, prompt_ids, config, nodes
    )


def table(*rows):
    """[N, W] with NaN for None."""
    return np.array(rows, np.float32)


def test_a_node_has_the_mean_reward_of_its_leaves_among_the_nodes_of_its_depth():
    found = advantages([1, 2, 3, 6])
    first = 1.5 / (math.sqrt(4.5) + 1e-4)  # 1.5 and 4.5: 3 -+ 1.5
    leaf = 1 / (math.sqrt(14 / 3) + 1e-4)  # 3 -+ (2, 1, 0, 3)
    nan = np.nan
    expected = table(
        [nan, -first, -2 * leaf], [nan, nan, -leaf], [nan, first, 0], [nan, nan, 3 * leaf]
    )
    np.testing.assert_allclose(found.of_steps, expected, rtol=1e-6)
    assert found.keep.tolist() == [True] * 4
    np.testing.assert_allclose(found.values, expected[:, 2], rtol=1e-6)
    plain = compute_advantages({"r": np.array([1.0, 2, 3, 6])}, {"r": 1.0}, np.zeros(4, int), GROUP)
    assert found.metrics == plain.metrics


def test_nodes_are_compared_inside_their_prompt_and_scaled_as_the_stage_says():
    both = advantages([1, 2, 3, 6, 10, 10, 10, 12], np.concatenate([FOUR, FOUR]), [4] * 4 + [7] * 4)
    np.testing.assert_array_equal(both.of_steps[:4], advantages([1, 2, 3, 6]).of_steps)
    np.testing.assert_array_equal(both.of_steps[4:], advantages([10, 10, 10, 12]).of_steps)
    scaled = advantages([1, 2, 3, 6], config=AdvantagesConfig(std="none", clip=2))
    np.testing.assert_allclose(scaled.of_steps[[0, 2], 1], [-1.5, 1.5])
    np.testing.assert_allclose(scaled.of_steps[:, 2], [-2, -1, 0, 2])  # 3 is clipped


def test_several_rewards_are_fused_each_by_itself():
    scores = {"a": np.array([1.0, 2, 3, 6]), "b": np.array([50.0, 40, 10, 20])}
    weights = {"a": 1.0, "b": 2.0}
    found = compute_tree_advantages(scores, weights, np.zeros(4, int), GROUP, FOUR)
    np.testing.assert_allclose(
        found.of_steps[[0, 2], 1], [-math.sqrt(0.5) * (1 - 2), math.sqrt(0.5) * (1 - 2)], rtol=1e-3
    )


def test_a_leaf_without_a_score_leaves_its_nodes_to_the_others():
    found = advantages([1, np.nan, 3, 6])
    first = math.sqrt(0.5)  # 1 and 4.5
    np.testing.assert_allclose(found.of_steps[:, 1], [-first, np.nan, first, np.nan], rtol=1e-4)
    np.testing.assert_array_equal(np.isnan(found.of_steps[:, 2]), [False, True, False, False])
    assert found.keep.tolist() == [True, False, True, True]
    without = advantages([np.nan, np.nan, 3, 6])
    np.testing.assert_array_equal(
        np.isnan(without.of_steps[:, 1]), [True] * 4
    )  # one node of two says nothing
    assert without.keep.tolist() == [False, False, True, True]


def test_the_first_sample_of_a_node_is_trained_there_even_where_its_own_leaf_has_no_score():
    assert advantages([np.nan, 1, 3, 6]).keep.tolist() == [True] * 4


def test_keep_extremes_prunes_the_nodes_in_the_middle_of_each_depth():
    found = advantages([1, 2, 3, 6], config=AdvantagesConfig(std="group", keep_extremes=1))
    np.testing.assert_array_equal(
        np.isnan(found.of_steps), [[1, 0, 0], [1, 1, 1], [1, 0, 1], [1, 1, 0]]
    )
    assert found.keep.tolist() == [True, False, True, True]


def test_equal_leaves_train_nothing():
    assert not advantages([2, 2, 2, 2]).keep.any()


def test_a_tree_shares_noise_until_its_splits():
    assert TreeConfig(splits=[1, 3]).num_leaves_sharing_noise == (4, 2, 2, 1)
    assert TreeConfig(splits=[0, 2], branches=3).num_leaves_sharing_noise == (3, 3, 1)
    keys = SampleKeys(
        1,
        [0] * 8,
        list(range(8, 16)),
        sharing=(8, *TreeConfig(splits=[1, 3]).num_leaves_sharing_noise),
    )
    assert keys.find_noise_owners(0) == [8] * 8
    assert (
        keys.find_noise_owners(1) == [8] * 4 + [12] * 4
    )  # two trees, which differ from the first stochastic step on
    assert keys.find_noise_owners(3) == [8, 8, 10, 10, 12, 12, 14, 14]
    assert keys.find_noise_owners(4) == keys.find_noise_owners(9) == list(range(8, 16))


@pytest.fixture
def predicted(model, monkeypatch):
    """The number of rows in each prediction of the network."""
    rows = []
    velocity = model.predict_velocity

    def counted(latents, sigma, conditioning):
        rows.append(len(latents))
        return velocity(latents, sigma, conditioning)

    monkeypatch.setattr(model, "predict_velocity", counted)
    return rows


def test_a_step_that_samples_share_is_predicted_once(model, predicted):
    conditioning = model.encode_texts(["ABCD"] * 4 + ["WXYZ"] * 4)
    keys = SampleKeys(5, [0] * 4 + [1] * 4, [0, 1, 2, 3] * 2)
    tree = SampleKeys(
        keys.seed,
        keys.prompt_ids,
        keys.samples,
        (4, *TreeConfig(splits=[1, 3]).num_leaves_sharing_noise),
    )
    every = Plan((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    found = generate_samples(model, conditioning, tree, SDE, every)
    assert predicted == [2, 2, 4, 4, 8, 8]
    record = found.trajectory
    for step, count in enumerate((4, 4, 2, 2, 1)):  # before each step
        blocks = record.latents[:, step].unflatten(0, (-1, count))
        assert torch.equal(blocks, blocks[:, :1].expand_as(blocks))
        assert len({tuple(block[0].flatten().tolist()) for block in blocks}) == len(blocks)
    assert torch.equal(record.next_latents[:, :-1], record.latents[:, 1:])

    predicted.clear()
    alone = generate_samples(model, conditioning, keys, SDE, every)
    assert predicted == [8] * 6
    first = [0, 4]  # the first leaf draws its own noise throughout
    torch.testing.assert_close(found.latents[first], alone.latents[first], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        record.log_probs[first], alone.trajectory.log_probs[first], rtol=0, atol=1e-5
    )


def test_a_micro_batch_shares_what_it_holds(model, predicted):
    keys = SampleKeys(5, [0] * 4, [0, 1, 2, 3], (4, 2, 1))
    conditioning = model.encode_texts(["ABCD"] * 4)
    every = Plan((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    whole = generate_samples(model, conditioning, keys, SDE, every)
    predicted.clear()
    cut = generate_samples(model, conditioning, keys, SDE, every, micro_batch=3)
    # Two passes of two samples, which share what they have in common.
    assert predicted == [1, 1, 2, 2, 2, 2] * 2
    torch.testing.assert_close(cut.latents, whole.latents, rtol=0, atol=1e-5)


def test_outside_a_window_the_splits_are_stochastic_and_trained():
    keys = {"tree": {"splits": [0, 4]}, "group_size": 4, "sampler": {"steps": 9}}
    mixed = OnlineStageConfig(
        algorithm=BranchGRPOConfig(), window={"kind": "fixed", "start": 1, "size": 2}, **keys
    )
    assert plan_steps(mixed.window, 9, 0, 0, mixed.tree.splits) == Plan((0, 1, 2, 4), (0, 1, 2, 4))
    every = OnlineStageConfig(algorithm=BranchGRPOConfig(), **keys)
    assert plan_steps(every.window, 9, 0, 0, every.tree.splits) == Plan(
        tuple(range(8)), tuple(range(8))
    )


def test_a_node_has_the_rewards_of_its_prompt():
    """Two trees with a reward each give the advantages that each gives alone."""
    rewards = np.array([1.0, 2, 3, 6])
    nodes = np.array([[0, 0], [0, 1], [2, 2], [2, 3]])
    none = np.full(4, np.nan)
    prompt_ids = np.repeat([0, 1], 4)
    scores = {"a": np.concatenate([rewards, none]), "b": np.concatenate([none, -rewards])}
    weights = {"a": 1.0, "b": 1.0}
    both = np.concatenate([nodes, nodes])
    found = compute_tree_advantages(
        scores, weights, prompt_ids, GROUP, both, np.ones(8, bool)
    ).of_steps
    alone = compute_tree_advantages(
        {"r": rewards}, {"r": 1.0}, np.zeros(4, int), GROUP, nodes
    ).of_steps
    assert np.array_equal(found, np.concatenate([alone, -alone]), equal_nan=True)
