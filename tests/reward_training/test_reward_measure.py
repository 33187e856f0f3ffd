"""Agreement, calibration and the gate of reward models, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ebbflow.data.labels import Judgement, Labels
from ebbflow.reward_training.decide import decide_reward_model
from ebbflow.reward_training.measure import (
    Share,
    average_agreement,
    bin_reliability,
    compute_share,
    cross_fit_confidence,
    fit_inverse_temperature,
    measure_rater_agreement,
)
from ebbflow.reward_training.train import (
    compute_judgement_loss,
    compute_rating_loss,
    fit_scale,
    is_held_out,
    split_labels,
)


def test_the_loss_of_judgements_is_that_of_bradley_and_terry():
    margins = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    preferences = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    log_shares = [-math.log(1 / (1 + math.exp(-2.0))), -math.log(1 / (1 + math.exp(-1.0)))]
    tie = -0.5 * math.log(1 / (1 + math.exp(-0.5))) - 0.5 * math.log(1 / (1 + math.exp(0.5)))
    loss = compute_judgement_loss(margins, preferences)
    assert loss.item() == pytest.approx((sum(log_shares) + tie) / 3, abs=1e-12)


def test_ratings_are_fitted_by_a_line_and_their_loss_has_no_offset():
    scores = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    assert fit_scale(scores, 3 * scores + 5) == pytest.approx((3, 5))
    assert fit_scale(torch.ones(3), torch.tensor([1.0, 2.0, 3.0])) == (0, 2)
    loss = compute_rating_loss(scores + 100, scores * 2)
    # Centred, the differences are -1, 0, 1.
    assert loss.item() == pytest.approx(2 / 3)


def test_the_temperature_makes_the_share_of_right_answers_the_confidence():
    # Of 10 margins of size 3, 8 have the right sign: p = 9 / 12, so that b = log(3) / 3.
    margins = np.array([3.0] * 8 + [-3.0] * 2)
    inverse = fit_inverse_temperature(margins, np.ones(10))
    assert inverse == pytest.approx(math.log(3) / 3, rel=1e-9)
    # Finite also where all agree: p = 11 / 12.
    assert fit_inverse_temperature(np.ones(10), np.ones(10)) == pytest.approx(math.log(11))
    # The scale of a network changes its temperature and not its probabilities.
    assert fit_inverse_temperature(10 * margins, np.ones(10)) == pytest.approx(
        inverse / 10, rel=1e-9
    )


def test_confidence_is_calibrated_where_halves_are_alike():
    margins = np.tile([3.0] * 8 + [-3.0] * 2, 2)
    prompts = [f"p{index % 2}" for index in range(20)]
    margins = np.array([margins[index // 2] for index in range(20)])
    confidences, right = cross_fit_confidence(margins, np.ones(20), prompts)
    assert confidences == pytest.approx(np.full(20, 0.75))
    (one,) = bin_reliability(confidences, right)
    assert (one.confidence, one.right, one.count) == (pytest.approx(0.75), 0.8, 20)


def test_agreement_is_a_mean_over_prompts_without_ties():
    margins = np.array([1.0, -1.0, 2.0, 0.0, 5.0])
    preferences = np.array([1.0, 1.0, 1.0, 0.0, 0.5])
    agreement = average_agreement(margins, preferences, ["a", "a", "a", "b", "c"])
    assert agreement == {"a": pytest.approx(2 / 3), "b": 0.5}
    share = compute_share([1.0, 0.0, 1.0, 1.0], 0.95)
    assert share.mean == 0.75
    assert 0 <= share.low < 0.75 < share.high <= 1


def test_raters_agree_over_the_pairs_with_several_answers():
    assert measure_rater_agreement([[1, 1], [1, 0], [0.5]]) == 0.5
    assert measure_rater_agreement([[1, 1, 0]]) == pytest.approx(1 / 3)
    assert measure_rater_agreement([[1], [0]]) is None


def test_prompts_stay_on_their_side_and_the_share_is_kept():
    prompts = [f"prompt {index}" for index in range(4000)]
    held_out = [prompt for prompt in prompts if is_held_out(prompt, 0.2)]
    # A mean of 800 with a standard deviation of 25.
    assert 700 < len(held_out) < 900
    assert all(is_held_out(prompt, 0.3) for prompt in held_out)


def test_no_spelling_of_a_held_out_prompt_is_trained_on():
    spellings = [(f"Signs of {index}.", f"signs of {index}") for index in range(200)]
    # Some pairs of spellings would be on both sides, and some on the held-out one.
    counts = [sum(is_held_out(text, 0.4) for text in pair) for pair in spellings]
    assert min(counts.count(0), counts.count(1), counts.count(2)) > 10
    labels = Labels()
    for text in (text for pair in spellings for text in pair):
        first, second = (labels.add_picture(text, content) for content in (b"first", b"second"))
        labels.judgements.append(Judgement(first, second, 1.0))
    trained, held_out = split_labels(labels, 0.4)
    assert sorted(trained + held_out) == list(range(400))
    assert {position // 2 for position in held_out} == {
        index for index, count in enumerate(counts) if count == 2
    }
    assert not {position // 2 for position in trained} & {position // 2 for position in held_out}


PROMPTS = [str(index) for index in range(60)]
GOOD = dict.fromkeys(PROMPTS, 1.0)
POOR = {prompt: float(index % 2) for index, prompt in enumerate(PROMPTS)}


def test_a_first_reward_model_must_beat_chance():
    assert decide_reward_model(GOOD, None, {}, 0.95).promote
    decision = decide_reward_model(POOR, None, {}, 0.95)
    assert not decision.promote
    assert "chance" in decision.reasons[0]


@pytest.mark.parametrize("champion", [None, 0.0])
def test_too_few_prompts_promote_nothing_however_well_they_agree(champion):
    for count, is_enough in ((2, False), (5, False), (6, True)):
        agreement = dict.fromkeys(PROMPTS[:count], 1.0)
        rival = champion if champion is None else dict.fromkeys(agreement, champion)
        decision = decide_reward_model(agreement, rival, {}, 0.95)
        assert decision.promote == is_enough
        assert is_enough or f"{count} held-out prompts are too few" in decision.reasons[0]


def test_a_reward_model_replaces_a_worse_one_alone():
    assert decide_reward_model(GOOD, POOR, {}, 0.95).promote
    assert not decide_reward_model(GOOD, GOOD, {}, 0.95).promote
    assert decide_reward_model(POOR, GOOD, {}, 0.95).difference == -0.5


def test_a_reward_model_that_prefers_hacked_pictures_is_refused():
    hacked = {
        "watermark": Share(mean=0.2, low=0.1, high=0.4),
        "blur": Share(mean=0.45, low=0.3, high=0.6),
    }
    decision = decide_reward_model(GOOD, None, hacked, 0.95)
    assert not decision.promote
    (reason,) = decision.reasons
    assert "watermark" in reason
    del hacked["watermark"]
    assert decide_reward_model(GOOD, None, hacked, 0.95).promote
