"""Which samples are trained on together: by cases, and for any advantages, groups and masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.algorithms.base import select_all_samples, select_groups, select_kept_samples
from ebbflow.algorithms.built_in import diffusion_dpo
from ebbflow.algorithms.built_in.dgpo import DGPOConfig
from ebbflow.algorithms.built_in.diffusion_dpo import DiffusionDPOConfig
from ebbflow.algorithms.built_in.sft import SFTConfig, select_best_samples

#            sample:  0    1    2    3    4    5    6    7    8    9
ADVANTAGE = np.array([0.1, 2.0, 0.5, 0.0, 9.0, 1.0, 3.0, 0.7, 0.7, 5.0])
PROMPTS = np.array([7, 3, 7, 7, 7, 3, 3, 8, 8, 5])
KEEP = np.array([True, True, True, True, False, True, True, True, True, True])


def chosen(select, config, advantage=ADVANTAGE, keep=KEEP, prompts=PROMPTS):
    return [group_index.tolist() for group_index in select(advantage, keep, prompts, config)]


def test_each_kept_sample_by_itself():
    assert chosen(select_kept_samples, DGPOConfig()) == [
        [0],
        [1],
        [2],
        [3],
        [5],
        [6],
        [7],
        [8],
        [9],
    ]


def test_every_sample_by_itself():
    assert chosen(select_all_samples, DGPOConfig()) == [[sample] for sample in range(10)]


def test_the_kept_samples_of_each_prompt_by_prompt_and_in_order():
    assert chosen(select_groups, DGPOConfig()) == [[1, 5, 6], [9], [0, 2, 3], [7, 8]]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [2, 6, 7, 9]),
        (2, [0, 1, 2, 6, 7, 8, 9]),
        (3, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        (99, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
    ],
)
def test_the_best_of_each_prompt_each_by_itself(count, expected):
    # Sample 4 is the best of prompt 7 and was not kept; 7 and 8 are equal, and the first goes
    # first.
    found = chosen(select_best_samples, SFTConfig(best=count))
    assert sorted(sample for (sample,) in found) == expected


def test_pairs_are_better_and_worse_and_ties_make_none():
    # By default the best with the worst: prompt 7 without its dropped best, prompt 3; 7 and 8 tie;
    # 9 is alone.
    assert sorted(chosen(diffusion_dpo.select_pairs, DiffusionDPOConfig())) == [[2, 3], [6, 5]]


def test_the_best_goes_with_the_worst_and_so_on_inwards():
    advantage = np.array([3.0, -4.0, 1.0, 7.0, -2.0, 0.0, 5.0, -6.0])
    everyone = np.ones(8, bool)
    prompt = np.zeros(8, np.int64)
    inwards = [[3, 7], [6, 1], [0, 4], [2, 5]]
    for share, count in [(0.01, 1), (0.2, 1), (0.25, 2), (0.4, 3), (0.5, 4)]:
        assert (
            chosen(
                diffusion_dpo.select_pairs,
                DiffusionDPOConfig(pairs_share=share),
                advantage,
                everyone,
                prompt,
            )
            == inwards[:count]
        )


def test_a_tie_inside_a_group_costs_that_pair_alone():
    advantage = np.array([1.0, 0.0, 0.0, -1.0])
    prompt = np.zeros(4, np.int64)
    assert chosen(
        diffusion_dpo.select_pairs,
        DiffusionDPOConfig(pairs_share=0.5),
        advantage,
        np.ones(4, bool),
        prompt,
    ) == [[0, 3]]


def test_nothing_kept_is_nothing_to_train_on():
    nobody = np.zeros(10, bool)
    for select, config in [
        (select_kept_samples, DGPOConfig()),
        (select_groups, DGPOConfig()),
        (select_best_samples, SFTConfig()),
        (diffusion_dpo.select_pairs, DiffusionDPOConfig()),
    ]:
        assert chosen(select, config, keep=nobody) == []


@st.composite
def batches(draw):
    """(advantage, keep, prompt ids): few values, so that ties are frequent, and ids beyond the
    precision of a float.
    """
    size = draw(st.integers(0, 24))
    column = {"min_size": size, "max_size": size}
    advantage = draw(st.lists(st.integers(-3, 3).map(float), **column))
    keep = draw(st.lists(st.booleans(), **column))
    prompts = draw(st.lists(st.sampled_from([0, 1, 2**53, 2**53 + 1]), **column))
    return np.array(advantage, np.float32), np.array(keep, bool), np.array(prompts, np.int64)


def flat(found):
    return [sample for group_index in found for sample in group_index]


@given(batches())
def test_groups_are_the_kept_samples_divided_by_prompt(batch):
    advantage, keep, prompts = batch
    found = chosen(select_groups, DGPOConfig(), *batch)
    assert (
        sorted(flat(found))
        == np.flatnonzero(keep).tolist()
        == flat(chosen(select_kept_samples, DGPOConfig(), *batch))
    )
    assert found == [
        np.flatnonzero(keep & (prompts == prompt)).tolist()
        for prompt in sorted(set(prompts[keep].tolist()))
    ]
    assert flat(chosen(select_all_samples, DGPOConfig(), *batch)) == list(range(len(keep)))


@given(batches(), st.integers(1, 5))
def test_no_sample_left_out_is_better_than_the_best(batch, count):
    advantage, keep, prompts = batch
    found = chosen(select_best_samples, SFTConfig(best=count), *batch)
    assert all(len(group_index) == 1 for group_index in found)
    taken = np.zeros(len(keep), bool)
    taken[np.array(flat(found), int)] = True
    assert len(flat(found)) == taken.sum()
    assert not (taken & ~keep).any()
    for prompt in np.unique(prompts[keep]):
        mine = keep & (prompts == prompt)
        assert (mine & taken).sum() == min(count, mine.sum())
        assert advantage[mine & ~taken].max(initial=-9) <= advantage[mine & taken].min()


@given(batches(), st.floats(0.01, 0.5))
def test_pairs_are_of_one_prompt_strictly_ordered_and_share_no_sample(batch, share):
    advantage, keep, prompts = batch
    found = chosen(diffusion_dpo.select_pairs, DiffusionDPOConfig(pairs_share=share), *batch)
    assert len(set(flat(found))) == 2 * len(found)
    assert set(flat(found)) <= set(np.flatnonzero(keep).tolist())
    for better, worse in found:
        assert prompts[better] == prompts[worse]
        assert advantage[better] > advantage[worse]
    for prompt in np.unique(prompts[keep]):
        mine = keep & (prompts == prompt)
        pairs = [pair for pair in found if prompts[pair[0]] == prompt]
        assert len(pairs) <= max(1, share * mine.sum())
        values = advantage[mine]
        assert (len(pairs) > 0) == (values.max() > values.min())
        if pairs:
            assert advantage[pairs[0]].tolist() == [values.max(), values.min()]
