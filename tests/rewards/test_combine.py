import dataclasses
import warnings
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from reward_cases import IMAGES, PROMPTS, Fixed, OfTheirImages, Watched, as_prompt, as_videos

from ebbflow.recipe import RecipeError
from ebbflow.recipe.registry import REWARDS, configure_reward
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward
from ebbflow.rewards.combine import (
    RewardError,
    Scorer,
    ScoreTable,
    load_reward,
    load_scorer,
    require_scored_share,
)


def test_reward_is_the_weighted_sum_and_nan_where_a_term_failed():
    one = Fixed(
        "one", [1, 0.5, np.nan], failures={2: "broken"}, metrics={"hit": np.array([1.0, 0, np.nan])}
    )
    two = Fixed("two", [0, 1, 1])
    watched = Fixed("watched", [np.nan, 3, 3], failures={0: "odd"})
    table = Scorer(((one, 2.0), (two, 0.5)), (watched,))(IMAGES, PROMPTS)
    assert np.array_equal(table.reward, [2.0, 1.5, np.nan], equal_nan=True)
    assert list(table.metrics) == ["one", "hit", "two", "watched"]
    assert table.failures == ["watched: odd", None, "one: broken"]
    assert table.failed_share == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Fixed("bad", [1, 2]), r"'bad' returned 'bad' of shape \(2,\) for 3 images"),
        (
            Fixed("bad", [1, np.inf, 2]),
            "'bad' returned 'bad' = inf for image 1; scores lie between -1e.30 and 1e.30",
        ),
        (Fixed("bad", [1, 2, -1e308]), "'bad' returned 'bad' = -1e.308 for image 2"),
        (
            Fixed("bad", [1, 2, 3], metrics={"extra": np.array([np.nan, 1e31, 0])}),
            "'bad' returned 'extra' = 1e.31 for image 1",
        ),
        (
            Fixed("bad", [1, 2, 3], metrics={"extra": np.zeros(1)}),
            "'bad' returned 'extra' of shape",
        ),
        (
            Fixed("bad", [1, 2, 3], metrics={"bad": np.zeros(3), "good": np.zeros(3)}),
            "'good'.*exists already",
        ),
        (Fixed("reward", [1, 2, 3]), "'reward'.*exists already"),
    ],
)
def test_a_reward_that_breaks_its_contract_is_named(reward, message):
    with pytest.raises(RewardError, match=message):
        Scorer(((Fixed("good", [1, 2, 3]), 1.0), (reward, 1.0)))(IMAGES, PROMPTS)


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (IMAGES.astype(np.float32), PROMPTS, "float32"),
        (IMAGES[..., 0], PROMPTS, r"\[3, 8, 8\]"),
        (
            np.zeros((3, 0, 8, 8, 3), np.uint8),
            PROMPTS,
            r"videos \[N, frames, height, width, 3\], got uint8 \[3, 0, 8, 8, 3\]",
        ),
        (np.zeros((3, 1, 2, 8, 8, 3), np.uint8), PROMPTS, r"\[3, 1, 2, 8, 8, 3\]"),
        (IMAGES, PROMPTS[:2], "3 images .* 2 prompts"),
    ],
)
def test_images_and_prompts_must_go_together(images, prompts, message):
    with pytest.raises(RewardError, match=message):
        Scorer(((Fixed("good", [1, 2, 3]), 1.0),))(images, prompts)


def test_too_many_failures_stop_the_stage():
    failed = Fixed("one", [np.nan, np.nan, 1], failures={0: "timeout", 1: "timeout"})
    table = Scorer(((failed, 1.0),))(IMAGES, PROMPTS)
    require_scored_share(table, limit=0.67)
    with pytest.raises(
        RewardError, match=r"2 of 3 images \(66.7%\).*max_failed_share = 5.0%.*one: timeout$"
    ):
        require_scored_share(table, limit=0.05)


def test_no_images_are_no_failure():
    table = load_scorer([configure_reward("ocr")], [configure_reward("similarity")])(IMAGES[:0], [])
    assert list(table.metrics) == ["ocr", "exact_match", "similarity"]
    assert table.reward.shape == (0,)
    require_scored_share(table, limit=0.0)


def test_guards_that_cannot_run_are_left_out_with_one_warning(monkeypatch):
    absent = Fixed("tesseract", [], reason="not on the PATH")
    monkeypatch.setattr("ebbflow.rewards.built_in.tesseract.Tesseract", lambda config: absent)
    monkeypatch.setattr(
        "ebbflow.rewards.built_in.similarity.Similarity", lambda: Fixed("similarity", [1, 2, 3])
    )
    monkeypatch.setattr("ebbflow.rewards.built_in.ocr.Ocr", lambda config: Fixed("ocr", [1, 1, 1]))
    with pytest.warns(UserWarning, match="tesseract: not on the PATH") as caught:
        scorer = load_scorer(
            [configure_reward("ocr")],
            [configure_reward("tesseract"), configure_reward("similarity")],
        )
    assert len(caught) == 1
    assert scorer.left_out == {"tesseract": "not on the PATH"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(scorer(IMAGES, PROMPTS).metrics) == ["ocr", "similarity"]


def test_a_trained_term_that_cannot_run_is_an_error(monkeypatch):
    absent = Fixed("tesseract", [], reason="not on the PATH")
    monkeypatch.setattr("ebbflow.rewards.built_in.tesseract.Tesseract", lambda config: absent)
    with pytest.raises(
        RewardError, match="'tesseract' is trained on and cannot run here: not on the PATH"
    ):
        load_scorer([configure_reward("tesseract")], [])


def test_every_reward_of_the_recipe_has_its_code():
    parts = {key: {"path": "somewhere"} for key in ("head", "tokenizer", "processor", "clip")}
    given = {"url": "http://localhost", "model": "judge", "frame_rate": 16, **parts}
    given |= {"classifier_label": "safe", "path": "somewhere", "uri": "models:/taste/1"}
    for name, config in REWARDS.items():
        required = {
            key: given[key] for key, field in config.model_fields.items() if field.is_required()
        }
        made = load_reward(configure_reward(name, **required))
        assert isinstance(made, Reward)
        assert made.name == name
    with pytest.raises(
        ValidationError, match="Take aesthetic, .* or give package.module:name of your own"
    ):
        configure_reward("beauty")


def test_scores_are_called_by_the_label():
    scorer = load_scorer(
        [configure_reward("similarity", label="letters", weight=2.0)],
        [configure_reward("similarity")],
    )
    assert list(scorer(IMAGES, PROMPTS).metrics) == ["letters", "similarity"]
    assert scorer.reward_weights == {"letters": 2.0}


def test_options_that_build_no_reward_cannot_be_made():
    class Unfinished(RewardConfig):
        name: Literal["unfinished"] = "unfinished"

    with pytest.raises(TypeError, match="build"):
        Unfinished()


def test_a_path_leads_to_a_reward_of_ones_own():
    images = np.stack(
        [np.zeros((8, 8, 3)), np.full((8, 8, 3), 255), np.full((8, 8, 3), 51)]
    ).astype(np.uint8)
    scorer = load_scorer(
        [configure_reward("reward_cases:Brightness", weight=3.0)], [configure_reward("similarity")]
    )
    table = scorer(images, PROMPTS)
    assert table.reward == pytest.approx([0, 3, 0.6])
    assert list(table.metrics) == ["Brightness", "similarity"]
    assert scorer.reward_weights == {"Brightness": 3.0}


def test_a_path_to_a_guard_that_cannot_run_here_leaves_it_out():
    with pytest.warns(
        UserWarning, match="guardrails left out of this run: Absent: not on this machine"
    ):
        scorer = load_scorer([configure_reward("ocr")], [configure_reward("reward_cases:Absent")])
    assert scorer.left_out == {"Absent": "not on this machine"}
    with pytest.raises(
        RewardError, match="'Absent' is trained on and cannot run here: not on this machine"
    ):
        load_scorer([configure_reward("reward_cases:Absent")], [])


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("reward_cases:as_nothing", RecipeError, "the module 'reward_cases' has no 'as_nothing'"),
        (
            "no_such_package.rewards:Mine",
            RecipeError,
            "No module named 'no_such_package'.* put its folder on PYTHONPATH",
        ),
        (
            "collections:OrderedDict",
            RewardError,
            "collections:OrderedDict is not a reward: derive it from ebbflow.rewards.base.Reward",
        ),
    ],
)
def test_a_path_that_leads_to_no_reward_says_so(path, error, message):
    with pytest.raises(error, match=message):
        load_scorer([configure_reward(path)], [])


def test_real_rewards_on_clean_renderings(clean):
    images, prompts = clean
    table = load_scorer(
        [configure_reward("ocr", weight=0.5), configure_reward("similarity", weight=2.0)], []
    )(images[:6], prompts[:6])
    assert np.allclose(table.reward, 0.5 * table.metrics["ocr"] + 2 * table.metrics["similarity"])
    assert table.reward.mean() > 2.3
    assert table.failures == [None] * 6


def test_tables_of_parts_are_the_table_of_all():
    scorer = Scorer(((Watched(), 2.0),))
    images = as_videos([[3], [0], [200]])[:, 0]
    parts = [scorer(images[:2], PROMPTS[:2]), scorer(images[2:], PROMPTS[2:])]
    together = ScoreTable.concatenate(parts)
    expected = scorer(images, PROMPTS)
    assert np.array_equal(together.reward, expected.reward, equal_nan=True)
    assert together.metrics.keys() == expected.metrics.keys()
    for name, values in expected.metrics.items():
        assert np.array_equal(together.metrics[name], values, equal_nan=True)
    assert together.failures == expected.failures


def of_two_sets(*sources):
    """(a scorer with a reward for words, one for signs and one for all, those rewards, prompts of
    these sets).
    """
    rewards = [OfTheirImages(name) for name in ("spells", "pleases", "always")]
    of_sets = {
        "spells": configure_reward("ocr", prompts=["words"]),
        "pleases": configure_reward("ocr", prompts=["signs"]),
    }
    prompts = [
        dataclasses.replace(as_prompt(index, None), source=source)
        for index, source in enumerate(sources)
    ]
    return (
        Scorer(tuple(zip(rewards, (2.0, 3.0, 1.0), strict=True)), of_sets=of_sets),
        rewards,
        prompts,
    )


def test_a_prompt_set_has_rewards_of_its_own():
    """The second image of each set cannot be scored by the reward of its set; that is no more than
    its own failure.
    """
    scorer, rewards, prompts = of_two_sets("words", "signs", "words", "signs")
    scorer = dataclasses.replace(scorer, rewards=scorer.rewards[:2])
    images = np.array([1, 2, 0, 0], np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    table = scorer(images, prompts)
    assert [made.asked for made in rewards] == [[[0, 2]], [[1, 3]], []]
    assert np.array_equal(table.reward, [2.0, 6.0, np.nan, np.nan], equal_nan=True)
    assert table.scored_rows.tolist() == [True, True, False, False]
    assert np.array_equal(
        table.metrics["spells_half"], [0.5, np.nan, np.nan, np.nan], equal_nan=True
    )
    assert np.array_equal(table.metrics["pleases"], [np.nan, 2.0, np.nan, np.nan], equal_nan=True)
    assert table.failures == [None, None, "spells: black", "pleases: black"]


def test_a_reward_without_prompts_here_is_not_asked():
    scorer, rewards, prompts = of_two_sets("signs", "signs")
    table = scorer(np.ones((2, 2, 2, 3), np.uint8), prompts)
    assert [len(made.asked) for made in rewards] == [0, 1, 1]
    assert table.reward.tolist() == [4.0, 4.0]
    assert "spells" in table.metrics
    assert "spells_half" not in table.metrics


def test_a_sample_that_nothing_scores_has_no_reward():
    scorer, _, prompts = of_two_sets("words", "letters")
    table = dataclasses.replace(scorer, rewards=scorer.rewards[:2])(
        np.ones((2, 2, 2, 3), np.uint8), prompts
    )
    assert np.array_equal(table.reward, [2.0, np.nan], equal_nan=True)
    assert table.failures == [None, "no trained reward scores the prompt set 'letters'"]


def test_the_gradient_of_a_sample_is_of_the_rewards_of_its_set():
    scorer, rewards, prompts = of_two_sets("words", "signs", "words")
    images = (
        torch.tensor([1.0, 2.0, 4.0])[:, None, None, None]
        .expand(3, 3, 2, 2)
        .clone()
        .requires_grad_()
    )
    total = scorer.score_with_gradient(images, prompts)
    assert total.tolist() == [3.0, 8.0, 12.0]
    assert [made.asked for made in rewards] == [[[0, 2]], [[1]], [[0, 1, 2]]]
    (gradient,) = torch.autograd.grad(total.sum(), images)
    assert gradient[:, 0, 0, 0].tolist() == [3.0, 4.0, 3.0]


def test_the_sets_of_a_scorer_are_those_of_the_recipe():
    scorer = load_scorer(
        [configure_reward("similarity"), configure_reward("ocr", prompts=["words"])], []
    )
    assert list(scorer.of_sets) == ["ocr"]
