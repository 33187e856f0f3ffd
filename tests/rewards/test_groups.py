"""Rewards that compare the images of a prompt: which groups they see, what they may not do, and the
win rates of the judge.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from reward_cases import as_prompt
from served_cases import answering

from ebbflow.online.sample_workers import RewardWorker
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import server
from ebbflow.rewards.base import NO_TARGET, Reward, RewardError, RewardResult
from ebbflow.rewards.built_in.pairwise_judge import PairwiseJudge
from ebbflow.rewards.combine import Scorer, load_reward, load_scorer
from ebbflow.rewards.groups import ALONE, compute_win_rates, list_balanced_pairs, score_groups
from ebbflow.rewards.trial import try_reward

NAN = float("nan")
PAIRWISE = {"name": "pairwise_judge", "url": "http://127.0.0.1:9", "model": "eyes"}


class Brighter(Reward):
    """The share of the others that are darker; ``name`` as a run sets it."""

    scores = "groups"

    name = "brighter"

    def __init__(self):
        self.groups = []

    def __call__(self, images, prompts):
        self.groups.append((prompts[0].prompt_id, len(images)))
        light = images.mean((1, 2, 3))
        failures = {int(index): "black" for index in np.flatnonzero(light == 0)}
        values = compute_win_rates(np.sign(light[:, None] - light[None]) / 2 + 0.5)
        values[list(failures)] = NAN
        return RewardResult(values, {"light": light}, failures)


class Tall(Reward):
    """A reward of single images."""

    name = "tall"

    def __call__(self, images, prompts):
        return RewardResult(np.full(len(images), float(images.shape[1])))


class FirstIsBrighter(Reward):
    """A reward of pairs: whether the first image is brighter; black images cannot be compared."""

    name = "first"
    scores = "pairs"
    value = 1.0

    def __call__(self, pairs, prompts):
        assert len(pairs) == len(prompts)
        light = pairs.mean((2, 3, 4))  # [pairs, 2]
        values = np.where(light[:, 0] > light[:, 1], self.value, 0.0)
        values[(light == 0).any(1)] = NAN
        failures = {int(index): "black" for index in np.flatnonzero(np.isnan(values))}
        return RewardResult(values, failures=failures)


class NotNumbers(Brighter):
    scores = "groups"

    def __call__(self, images, prompts):
        return images.mean((1, 2, 3))


class TooFew(Brighter):
    scores = "groups"

    def __call__(self, images, prompts):
        return RewardResult(np.zeros(len(images) - 1))


def grey(*levels):
    """Images of one colour each."""
    return np.repeat(np.array(levels, np.uint8), 8 * 8 * 3).reshape(-1, 8, 8, 3)


def prompts(*ids):
    return [as_prompt(index, "AB") for index in ids]


def test_win_rates_are_the_share_of_the_comparisons_that_were_won():
    wins = np.array([[NAN, 1, 1, 0.75], [0, NAN, 1, NAN], [0, 0, NAN, NAN], [0.25, NAN, NAN, NAN]])
    assert np.array_equal(compute_win_rates(wins), [2.75 / 3, 0.5, 0, NAN], equal_nan=True)
    complete = np.random.default_rng(0).random((5, 5))
    complete = np.triu(complete, 1) + np.tril(1 - complete.T, -1)
    assert compute_win_rates(complete).mean() == pytest.approx(0.5)
    assert compute_win_rates(complete)[2] == pytest.approx(complete[2, [0, 1, 3, 4]].mean())


def test_a_group_is_all_images_of_a_prompt_wherever_they_are():
    judge = Brighter()
    result = score_groups(judge, grey(9, 1, 5, 7, 3, 8), prompts(4, 2, 4, 2, 4, 7))
    assert judge.groups == [(4, 3), (2, 2)]
    assert np.array_equal(result.values, [1, 0, 0.5, 1, 0, NAN], equal_nan=True)
    assert np.array_equal(result.metrics["light"], [9, 1, 5, 7, 3, NAN], equal_nan=True)
    assert result.failures == {5: ALONE}


def test_outcomes_of_pairs_become_win_rates_of_images(monkeypatch):
    monkeypatch.setattr("ebbflow.rewards.groups.PAIRS_PER_CALL", 2)
    result = score_groups(FirstIsBrighter(), grey(9, 1, 5, 0, 7), prompts(4, 4, 4, 4, 2))
    assert np.array_equal(result.values, [1, 0, 0.5, NAN, NAN], equal_nan=True)
    assert result.failures == {3: "black", 4: ALONE}
    unanswered = [1 / 3, 1 / 3, 1 / 3, 1, NAN]
    assert np.array_equal(result.metrics["first_unanswered"], unanswered, equal_nan=True)


def test_the_outcome_of_a_pair_is_a_probability(monkeypatch):
    monkeypatch.setattr(FirstIsBrighter, "value", 1.5)
    with pytest.raises(RewardError, match="'first' returned 1.5 for a pair; return the probabil"):
        score_groups(FirstIsBrighter(), grey(9, 1), prompts(4, 4))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"scores": "frames"}, "Odd.scores = 'frames'; take one of images, pairs, groups, videos"),
        ({"has_gradient": True}, "Odd has has_gradient = True; define score_with_gradient"),
        ({"compute_features": len}, "Odd defines compute_features; declare has_features = True"),
    ],
)
def test_a_declaration_that_differs_from_the_code_fails_at_the_class(members, message):
    with pytest.raises(TypeError, match=message):
        type("Odd", (Reward,), members)


def test_the_scorer_adds_it_to_rewards_of_single_images_and_keeps_failures():
    scorer = Scorer(((Brighter(), 2.0), (Tall(), 0.5)))
    table = scorer(grey(9, 0, 5, 7), prompts(0, 1, 0, 1))
    assert np.array_equal(table.reward, [2 + 4, NAN, 4, 2 + 4], equal_nan=True)
    assert list(table.metrics) == ["brighter", "light", "tall"]
    assert table.failures == [None, "brighter: black", None, None]
    assert scorer.compares_groups


def test_of_videos_frames_of_the_same_time_are_compared():
    videos = np.stack([grey(9, 1, 5), grey(3, 2, 0), grey(7, 7, 7), grey(1, 8, 8)])
    judge = Brighter()
    table = Scorer(((judge, 1.0),))(videos, prompts(0, 0, 1, 1))
    assert judge.groups == [(0, 2), (1, 2)] * 3
    assert np.array_equal(table.reward, [2 / 3, NAN, 1 / 3, 2 / 3], equal_nan=True)
    assert table.metrics["light"].tolist() == [5, 5 / 3, 7, 17 / 3]
    assert table.failures[1] == "brighter: frame 2: black"


def test_a_validation_scores_single_images_without_it():
    guardrail = Tall()
    guardrail.name = "watched"
    worker = RewardWorker(Scorer(((Brighter(), 2.0), (Tall(), 0.5)), (guardrail,)))
    pictures = grey(9, 1, 5, 3)
    scores, *_ = worker.score(pictures, prompts(0, 0, 1, 1), 0)
    assert list(scores.metrics) == ["brighter", "light", "tall"]
    alone, *_ = worker.score(pictures, prompts(0, 1, 2, 3), 0, with_guards=True)
    assert list(alone.metrics) == ["tall", "watched"]
    assert alone.reward.tolist() == [4] * 4
    assert alone.failures == [None] * 4


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "NotNumbers",
            "'NotNumbers' returned a ndarray; return an ebbflow.rewards.base.RewardResult",
        ),
        ("TooFew", r"'TooFew' returned 'TooFew' of shape \(1,\) for a group of 2 images"),
    ],
)
def test_what_breaks_the_contract_is_named(kind, message):
    broken = load_reward(configure_reward(f"{__name__}:{kind}"))
    with pytest.raises(RewardError, match=message):
        Scorer(((broken, 1.0),))(grey(1, 2), prompts(0, 0))


def test_a_users_own_is_found_by_its_method_and_tried_on_two_images_of_each_prompt():
    config = configure_reward(f"{__name__}:Brighter")
    assert config.compares
    assert not configure_reward(f"{__name__}:Tall").compares
    try_reward(config, prompts(3, 4), 8, 8)
    with pytest.raises(
        RewardError,
        match="fails on 4 images of 8 x 8 pixels: RewardError: .*'NotNumbers' returned a ndarray",
    ):
        try_reward(configure_reward(f"{__name__}:NotNumbers"), prompts(3, 4), 8, 8)


def made_by_a_function():
    return Brighter()


def test_a_function_that_makes_one_is_refused():
    with pytest.raises(
        RewardError,
        match="made_by_a_function makes a reward of groups; name the class",
    ):
        load_reward(configure_reward(f"{__name__}:made_by_a_function"))


def test_it_is_no_guardrail():
    with pytest.raises(
        RecipeError, match="guardrails: pairwise_judge compares the images of a prompt, and an"
    ):
        Recipe.model_validate({"guardrails": [PAIRWISE]})
    with pytest.raises(RewardError, match="guardrails: Brighter compares the images of a prompt"):
        load_scorer([], [configure_reward(f"{__name__}:Brighter")])


def test_an_evaluation_needs_another_reward():
    with pytest.raises(
        RecipeError, match="rewards: all of them, or all of a prompt set, compare the images"
    ):
        Recipe.model_validate({"rewards": [PAIRWISE]})
    branch = {"prompts": ["words"], "rewards": [PAIRWISE]}
    with pytest.raises(
        RecipeError,
        match="branches.a.rewards: all of them, or all of a prompt set, compare the images",
    ):
        Recipe.model_validate({"rewards": ["jpeg_compressibility"], "branches": {"a": branch}})
    own = {"rewards": [f"{__name__}:Brighter", PAIRWISE]}
    with pytest.raises(
        RecipeError, match="add a reward that does, so that policies can be compared"
    ):
        _ = Recipe.model_validate(own).evaluated_rewards
    both = Recipe.model_validate({"rewards": ["ocr", PAIRWISE]})
    assert [config.name for config in both.evaluated_rewards] == ["ocr"]


def test_requests_to_a_server_hold_single_images_or_videos():
    with pytest.raises(
        RewardError,
        match="'Brighter' compares images, and requests hold single images or videos; name it in",
    ):
        server.run_reward_server(configure_reward(f"{__name__}:Brighter"), "127.0.0.1", 0)
    with pytest.raises(
        RewardError, match="'Level' scores latents, and requests hold single images or videos"
    ):
        server.run_reward_server(configure_reward("test_latent_rewards:Level"), "127.0.0.1", 0)


LEVELS = (40, 200, 120, 10)


def shows(said):
    """A server of a model that sees how bright two images are, and answers with ``said`` of
    that."""

    def behave(handler):
        content = handler.asked.json["messages"][0]["content"]
        files = [
            base64.b64decode(part["image_url"]["url"].partition(",")[2])
            for part in content
            if part["type"] == "image_url"
        ]
        levels = [int(np.asarray(Image.open(io.BytesIO(file)))[0, 0, 0]) for file in files]
        message, top = said(*levels)
        tokens = {
            "content": [
                {
                    "token": "?",
                    "logprob": 0.0,
                    "top_logprobs": [{"token": t, "logprob": p} for t, p in top],
                }
            ]
        }
        choice = {
            "index": 0,
            "message": {"content": message},
            "logprobs": tokens if top else None,
            "finish_reason": "stop",
        }
        body = json.dumps({"choices": [choice]}).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def judged(said, **keys):
    """(the result of comparing ``LEVELS``, what was asked)."""
    with answering(shows(said)) as served:
        config = configure_reward("pairwise_judge", url=served.url, model="eyes", timeout=5, **keys)
        judge = PairwiseJudge(config, sleep=lambda seconds: None)
        result = score_groups(judge, grey(*LEVELS), [as_prompt(3, "AB")] * len(LEVELS))
    return result, served.asked


def first_wins(first, second):
    return "1" if first > second else "2"


RATES = [1 / 3, 1, 2 / 3, 0]


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        (lambda a, b: (f" Image {first_wins(a, b)}.\n", []), {"answer": "choice"}),
        (
            lambda a, b: (
                f"<think>2 is</think>\n<answer>Image {first_wins(a, b)} is better</answer>",
                [],
            ),
            {"answer": "reasoned"},
        ),
    ],
    ids=["choice", "reasoned"],
)
def test_the_judge_gives_the_share_of_the_others_that_an_image_beats(said, keys):
    result, asked = judged(said, **keys)
    assert result.values == pytest.approx(RATES)
    assert result.failures == {}
    assert result.metrics == {"pairwise_judge_unanswered": pytest.approx([0] * 4)}
    assert len(asked) == 6
    texts = {
        part["text"]
        for one in asked
        for part in one.json["messages"][0]["content"]
        if part["type"] == "text"
    }
    assert texts == {'Which of these two images is better, for the prompt ""AB""? Answer 1 or 2.'}
    assert all("logprobs" not in one.json for one in asked)


def test_a_probability_is_a_share_of_the_win():
    result, asked = judged(lambda a, b: ("", [("1", math.log(a / 250)), (" 2", math.log(b / 250))]))
    expected = [np.mean([a / (a + b) for b in LEVELS if b != a]) for a in LEVELS]
    assert result.values == pytest.approx(expected)
    assert result.values.mean() == pytest.approx(0.5)
    assert all((one.json["max_tokens"], one.json["logprobs"]) == (1, True) for one in asked)


def test_an_answer_that_names_no_winner_is_left_out_and_counted():
    """Every comparison with the darkest image fails: it has no score, and the others are compared
    with each other alone.
    """
    result, _ = judged(
        lambda a, b: ("both" if 10 in (a, b) else first_wins(a, b), []), answer="choice"
    )
    assert np.array_equal(result.values, [0, 1, 0.5, NAN], equal_nan=True)
    assert result.metrics["pairwise_judge_unanswered"] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert list(result.failures) == [3]
    assert re.search(
        'answered "both", which is no choice: the whole answer must be 1 or 2', result.failures[3]
    )


@pytest.mark.parametrize(
    "text", ["12", "3", "Image 1 or Image 2", "", "<answer>Image 1 is better</answer> or not"]
)
@pytest.mark.parametrize("answer", ["choice", "reasoned"])
def test_words_are_taken_to_the_letter(text, answer):
    result, _ = judged(lambda a, b: (text, []), answer=answer)
    assert np.isnan(result.values).all()
    assert len(result.failures) == 4


def test_a_question_about_the_target_needs_one():
    config = configure_reward(
        "pairwise_judge",
        url="http://127.0.0.1:9",
        model="eyes",
        question="Which one says {target}?",
    )
    assert config.reads
    result = score_groups(PairwiseJudge(config), grey(1, 2), [as_prompt(0, None)] * 2)
    assert np.isnan(result.values).all()
    assert result.failures == {0: NO_TARGET, 1: NO_TARGET}


@pytest.mark.parametrize("count", [2, 3, 8, 9])
def test_each_image_is_first_in_half_of_its_comparisons(count):
    pairs = list_balanced_pairs(count)
    assert {frozenset(pair) for pair in pairs} == {
        frozenset(pair) for pair in combinations(range(count), 2)
    }
    assert len(pairs) == count * (count - 1) // 2
    first = Counter(pair[0] for pair in pairs)
    assert all(abs(2 * first[index] - (count - 1)) <= 1 for index in range(count))
