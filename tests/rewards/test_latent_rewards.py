"""How a scorer scores latents, and hands on the gradient of their score."""

import numpy as np
import pytest
import torch
from reward_cases import IMAGES, PROMPTS, Fixed, OfTheirImages

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import RewardError, Scorer, load_reward


class Level(Reward):
    """Mean of the latents, which it scores without images; ``lost``: below which it fails."""

    scores = "latents"
    has_gradient = True

    def __init__(self, lost=-1e9):
        self.name = "level"
        self.lost = lost
        self.seen = []

    def __call__(self, latents, prompts):
        self.seen.append(latents)
        values = latents.mean((1, 2)).astype(float)
        lost = np.flatnonzero(values < self.lost)
        values[lost] = np.nan
        return RewardResult(values, failures={int(index): "too low" for index in lost})

    def score_with_gradient(self, latents, prompts):
        return latents.mean((1, 2))


LATENTS = np.arange(12.0).reshape(3, 2, 2).astype(np.float32)


def test_a_reward_of_latents_gets_them_beside_one_of_images():
    made = load_reward(configure_reward(f"{__name__}:Level", label="level", options={"lost": 2}))
    scorer = Scorer(((made, 2.0),), (Fixed("watched", [1, 2, 3]),))
    assert scorer.reads_latents
    assert not Scorer((), (Fixed("watched", []),)).reads_latents
    table = scorer(IMAGES, PROMPTS, LATENTS)
    assert np.array_equal(table.reward, [np.nan, 11, 19], equal_nan=True)
    assert table.metrics["watched"].tolist() == [1, 2, 3]
    assert table.failures == ["level: too low", None, None]
    videos = np.zeros((3, 5, 8, 8, 3), np.uint8)
    assert Scorer(((made, 2.0),))(videos, PROMPTS, LATENTS).reward[1] == 11, (
        "those of a video are scored whole"
    )


def test_latents_that_are_missing_or_not_finite():
    """They come out as failures of the sample anyhow; a network must not see them."""
    made = Level()
    broken = LATENTS.copy()
    broken[1] = np.nan
    assert Scorer(((made, 1.0),))(IMAGES, PROMPTS, broken).reward.tolist() == [1.5, 0, 9.5]
    assert np.isfinite(made.seen[0]).all()
    assert np.isnan(broken[1]).all(), "a reward writes into a copy"
    with pytest.raises(
        RewardError, match="'level' scores latents, and there are none of 3 samples"
    ):
        Scorer(((made, 1.0),))(IMAGES, PROMPTS)
    with pytest.raises(RewardError, match="'level' scores latents, and there are 2 of 3 samples"):
        Scorer(((made, 1.0),))(IMAGES, PROMPTS, LATENTS[:2])


def test_what_makes_a_reward_of_latents_must_be_the_class():
    """Workers learn from the path whether they have to send latents."""
    assert configure_reward(f"{__name__}:Level").scores == "latents"
    assert configure_reward("ocr").scores == "images"
    with pytest.raises(
        RewardError, match="make_level makes a reward of latents; name the class with"
    ):
        load_reward(configure_reward(f"{__name__}:make_level"))


def make_level():
    return Level()


def test_a_gradient_of_latents_decodes_only_for_rewards_of_images():
    decoded = []

    def decode(latents):
        decoded.append(len(latents))
        return latents[:, None].expand(-1, 3, -1, -1)

    latents = torch.tensor(LATENTS, requires_grad=True)
    alone = Scorer(((Level(), 2.0),))
    alone.require_gradients("refl")
    assert alone.score_latents_with_gradient(latents, PROMPTS, decode).tolist() == [3, 11, 19]
    assert decoded == []
    both = Scorer(((Level(), 2.0), (OfTheirImages("first"), 10.0)))
    total = both.score_latents_with_gradient(latents, PROMPTS, decode)
    assert total.tolist() == [3, 11 + 40, 19 + 80]
    assert decoded == [3]
    (gradient,) = torch.autograd.grad(total.sum(), latents)
    assert gradient[0].tolist() == [[10.5, 0.5], [0.5, 0.5]]
