import warnings

import numpy as np
import pytest
from pydantic import ValidationError
from reward_cases import as_prompt

from ebbflow.recipe import RecipeError
from ebbflow.recipe.recipe import REWARD_NAMES, RewardTerm
from ebbflow.rewards import combine
from ebbflow.rewards.base import RewardResult
from ebbflow.rewards.combine import RewardError, Scorer, load_rewards, load_scorer, require_scored

IMAGES = np.zeros((3, 8, 8, 3), np.uint8)
PROMPTS = [as_prompt(index, "AB") for index in range(3)]


class Fixed:
    """A reward that gives what it is told."""

    def __init__(self, name, values, reason=None, metrics=None, failures=None):
        self.name, self.reason = name, reason
        self.result = RewardResult(np.asarray(values, np.float64), metrics or {}, failures or {})

    def unavailable(self):
        return self.reason

    def __call__(self, images, prompts):
        return self.result


def test_reward_is_the_weighted_sum_and_nan_where_a_term_failed():
    one = Fixed("one", [1, 0.5, np.nan], failures={2: "broken"}, metrics={"hit": np.array([1.0, 0, np.nan])})
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
        (Fixed("bad", [1, 2]), r"'bad' gave 'bad' the shape \(2,\) for 3 images"),
        (Fixed("bad", [1, np.inf, 2]), "'bad' gave an infinite 'bad' for image 1"),
        (Fixed("bad", [1, 2, 3], metrics={"extra": np.zeros(1)}), "'bad' gave 'extra' the shape"),
        (Fixed("bad", [1, 2, 3], metrics={"bad": np.zeros(3), "good": np.zeros(3)}), "'good'.*exists already"),
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
        (IMAGES, PROMPTS[:2], "3 images .* 2 prompts"),
    ],
)
def test_images_and_prompts_must_go_together(images, prompts, message):
    with pytest.raises(RewardError, match=message):
        Scorer(((Fixed("good", [1, 2, 3]), 1.0),))(images, prompts)


def test_too_many_failures_stop_the_stage():
    failed = Fixed("one", [np.nan, np.nan, 1], failures={0: "timeout", 1: "timeout"})
    table = Scorer(((failed, 1.0),))(IMAGES, PROMPTS)
    require_scored(table, limit=0.67)
    with pytest.raises(RewardError, match=r"2 of 3 images \(66.7%\).*max_failed_share = 5.0%.*one: timeout$"):
        require_scored(table, limit=0.05)


def test_no_images_are_no_failure():
    table = load_scorer([RewardTerm(name="ocr")], ["similarity"])(IMAGES[:0], [])
    assert list(table.metrics) == ["ocr", "exact_match", "similarity"]
    assert table.reward.shape == (0,)
    require_scored(table, limit=0.0)


def test_guards_that_cannot_run_are_left_out_with_one_warning(monkeypatch):
    monkeypatch.setitem(combine.REWARDS, "tesseract", lambda: Fixed("tesseract", [], reason="not on the PATH"))
    monkeypatch.setitem(combine.REWARDS, "similarity", lambda: Fixed("similarity", [1, 2, 3]))
    monkeypatch.setitem(combine.REWARDS, "ocr", lambda: Fixed("ocr", [1, 1, 1]))
    with pytest.warns(UserWarning, match="tesseract: not on the PATH") as caught:
        scorer = load_scorer([RewardTerm(name="ocr")], ["tesseract", "similarity"])
    assert len(caught) == 1
    assert scorer.left_out == {"tesseract": "not on the PATH"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(scorer(IMAGES, PROMPTS).metrics) == ["ocr", "similarity"]


def test_a_trained_term_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setitem(combine.REWARDS, "tesseract", lambda: Fixed("tesseract", [], reason="not on the PATH"))
    with pytest.raises(RewardError, match="'tesseract' is trained on and cannot run here: not on the PATH"):
        load_scorer([RewardTerm(name="tesseract")], [])


def test_the_registry_is_what_the_recipe_accepts():
    for name in combine.REWARDS:
        assert RewardTerm(name=name).name == name
    assert [reward.name for reward in load_rewards(list(combine.REWARDS))] == list(combine.REWARDS)
    with pytest.raises(
        RewardError, match="no reward is called 'beauty'; there are ocr, .* or give package.module:Name of your own"
    ):
        load_rewards(["beauty"])
    with pytest.raises(ValidationError, match="take ocr, .* or give package.module:name of your own"):
        RewardTerm(name="beauty")
    assert list(combine.REWARDS) == list(REWARD_NAMES)


def test_a_path_leads_to_a_reward_of_ones_own():
    images = np.stack([np.zeros((8, 8, 3)), np.full((8, 8, 3), 255), np.full((8, 8, 3), 51)]).astype(np.uint8)
    scorer = load_scorer([RewardTerm(name="reward_cases:Brightness", weight=3.0)], ["similarity"])
    table = scorer(images, PROMPTS)
    assert table.reward == pytest.approx([0, 3, 0.6])
    assert list(table.metrics) == ["Brightness", "similarity"]
    assert scorer.weights == {"Brightness": 3.0}


def test_a_path_to_a_guard_that_cannot_run_here_leaves_it_out():
    with pytest.warns(UserWarning, match="guards left out of this run: Absent: not on this machine"):
        scorer = load_scorer([RewardTerm(name="ocr")], ["reward_cases:Absent"])
    assert scorer.left_out == {"Absent": "not on this machine"}
    with pytest.raises(RewardError, match="'Absent' is trained on and cannot run here: not on this machine"):
        load_scorer([RewardTerm(name="reward_cases:Absent")], [])


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("reward_cases:as_nothing", RecipeError, "the module 'reward_cases' has no 'as_nothing'"),
        ("no_such_package.rewards:Mine", RecipeError, "No module named 'no_such_package'.* put its folder on PYTHONPATH"),
        ("collections:OrderedDict", RewardError, "collections:OrderedDict is no reward: it has no 'unavailable'"),
    ],
)
def test_a_path_that_leads_to_no_reward_says_so(path, error, message):
    with pytest.raises(error, match=message):
        load_scorer([RewardTerm(name=path)], [])


def test_real_rewards_on_clean_renderings(clean):
    images, prompts = clean
    table = load_scorer([RewardTerm(name="ocr", weight=0.5), RewardTerm(name="similarity", weight=2.0)], [])(
        images[:6], prompts[:6]
    )
    assert np.allclose(table.reward, 0.5 * table.metrics["ocr"] + 2 * table.metrics["similarity"])
    assert table.reward.mean() > 2.3
    assert table.failures == [None] * 6
