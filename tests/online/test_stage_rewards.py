"""How rewards train the policy of a stage: negated, compared, of latents, equal, or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loop_cases import NAMES, keys_of

from ebbflow.models.families.glyph import GlyphModel
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import RewardError, Scorer
from ebbflow.rewards.groups import compute_win_rates
from tests.parameters import changed


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


ONE_UPDATE = {"steps": 1, "updates_per_step": 1, "reference": {"weight": 0}, "sgd": 0.01}


@pytest.fixture
def scale_reward(scorer):
    """``scale_reward(-1)``: the scorer with its reward times -1; with 0 everyone gets the same."""
    return lambda factor: Scorer(((Turned(scorer.rewards[0][0], factor), 1.0),))


@pytest.mark.parametrize(
    "name", ["mix_grpo", "grpo_guard", "flow_dppo", "dgpo", "awm", "refl", "draft", "srpo"]
)
def test_parameters_move_against_a_negated_reward(run, scale_reward, name):
    """The same stage with the negated reward moves the parameters the other way, on the
    whole."""
    config = {**ONE_UPDATE, "algorithm": {"name": name}}
    moves = []
    for judge in (scale_reward(1), scale_reward(-1)):
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


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_REWARDS])
def test_groups_that_say_nothing_train_nothing(run, scale_reward, name):
    """A reward that gives everyone the same: no update, no crash, and the metrics say why."""
    policy, before, logged, record = run(judge=scale_reward(0), algorithm=keys_of(name))
    assert not changed(policy, before)
    assert record.optimizer_steps == 0
    for metrics in logged:
        assert metrics["group/zero_std_share"] == 1
        assert metrics["group/dropped_samples"] == 8
        assert metrics["updates"] == 0
        assert "loss" not in metrics


@pytest.mark.parametrize("name", WITHOUT_REWARDS)
def test_a_teacher_is_learnt_from_whatever_the_reward_says(run, scale_reward, name):
    policy, before, logged, record = run(judge=scale_reward(0), algorithm=keys_of(name))
    assert changed(policy, before)
    assert record.optimizer_steps == 2
    assert logged[0]["group/zero_std_share"] == 1


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
    config = {**ONE_UPDATE, "algorithm": {"name": name}}
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
