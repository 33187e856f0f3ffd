"""Advantages of a batch in one line, and the batches that several files test."""

import numpy as np
from hypothesis import strategies as st

from ebbflow.algorithms.advantages import compute_advantages
from ebbflow.recipe.choices import AdvantagesConfig

MODES = ["global", "group", "none"]
NAN = float("nan")


def combine_advantages(rewards, weights, prompt_ids, history=None, scored=None, **keys):
    """Advantages from the scores of several rewards."""
    scores = {name: np.array(values, np.float64) for name, values in rewards.items()}
    config = AdvantagesConfig(**{"std": "group", "clip": 1e6} | keys)
    return compute_advantages(
        scores, weights, np.array(prompt_ids, np.int64), config, history, scored
    )


def advantages(rewards, prompt_ids, std="group", **keys):
    """Advantages from the scores of one."""
    return combine_advantages({"only": rewards}, {"only": 1.0}, prompt_ids, std=std, **keys)


REWARDS = [0.1, 0.5, 0.3, 0.9, 0.2, 0.4, 0.8]
OTHER = [5.0, -1.0, 2.0, 0.0, 0.0, 3.0, 1.0]
"""Of another reward, for the same samples."""
PROMPTS = [4, 4, 4, 7, 7, 7, 7]


@st.composite
def batches(draw):
    """Rewards on a grid of 1/64 (exact in float), NaN among them, with their prompt ids."""
    size = draw(st.integers(1, 24))
    reward = st.one_of(st.integers(-640, 640).map(lambda n: n / 64), st.just(NAN))
    rewards = draw(st.lists(reward, min_size=size, max_size=size))
    prompt_ids = draw(
        st.lists(st.integers(0, 2**62), min_size=1, max_size=4).flatmap(
            lambda ids: st.lists(st.sampled_from(ids), min_size=size, max_size=size)
        )
    )
    return np.array(rewards), np.array(prompt_ids)
