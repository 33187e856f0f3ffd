import dataclasses
import warnings
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from reward_cases import as_prompt

from ebbflow.recipe import RecipeError
from ebbflow.recipe.registry import REWARDS, configure_reward
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import (
    RewardError,
    Scorer,
    ScoreTable,
    load_reward,
    load_scorer,
    require_scored_share,
)
from ebbflow.rewards.videos import FRAMES_SCORED, select_scored_frames

IMAGES = np.zeros((3, 8, 8, 3), np.uint8)
PROMPTS = [as_prompt(index, "AB") for index in range(3)]


class Fixed(Reward):
    """A reward that gives fixed values."""

    def __init__(self, name, values, reason=None, metrics=None, failures=None):
        self.name = name
        self.reason = reason
        self.result = RewardResult(np.asarray(values, np.float64), metrics or {}, failures or {})

    def explain_unavailable(self):
        return self.reason

    def __call__(self, images, prompts):
        return self.result


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


class Watched(Reward):
    """The grey of an image; fails on black ones. It remembers what it was shown."""

    name = "grey"

    def __init__(self):
        self.images = None
        self.prompts = None

    def __call__(self, images, prompts):
        self.images, self.prompts = images, list(prompts)
        values = images.mean((1, 2, 3))
        failures = {
            int(index): f"black, {prompts[index].prompt}" for index in np.flatnonzero(values == 0)
        }
        values[list(failures)] = np.nan
        return RewardResult(values, {"squared": values**2}, failures)


def as_videos(greys):
    """Videos of 4 x 6 pixels, each frame of one grey: [N, frames] -> [N, frames, 4, 6, 3]."""
    return np.asarray(greys, np.uint8)[..., None, None, None] * np.ones((4, 6, 3), np.uint8)


def test_a_videos_score_is_the_mean_over_its_frames():
    greys = np.array([[1, 5, 9], [10, 10, 40]])
    watched = Watched()
    other = Fixed("other", [0, 0, 3, 1, 1, 1])
    table = Scorer(((watched, 2.0), (other, 3.0)), ())(as_videos(greys), PROMPTS[:2])
    assert table.metrics["grey"] == pytest.approx([5, 20])
    assert table.metrics["squared"] == pytest.approx([107 / 3, 1800 / 3])
    assert table.reward == pytest.approx([2 * 5 + 3 * 1, 2 * 20 + 3 * 1])
    assert table.failures == [None, None]
    assert watched.prompts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert np.array_equal(watched.images, as_videos(greys).reshape(6, 4, 6, 3))


def test_of_a_long_video_evenly_spaced_frames_are_scored():
    greys = np.arange(1, 82) + np.zeros((2, 1), int)
    watched = Watched()
    table = Scorer(((watched, 1.0),))(as_videos(greys), PROMPTS[:2])
    shown = watched.images[:, 0, 0, 0].reshape(2, FRAMES_SCORED)
    assert shown[0].tolist() == shown[1].tolist() == [1, 12, 24, 35, 47, 58, 70, 81]
    assert table.reward == pytest.approx([41, 41])


@given(st.integers(1, 400))
def test_scored_frames_are_each_once_and_evenly_spaced(count):
    shown = select_scored_frames(count)
    assert len(shown) == min(count, FRAMES_SCORED)
    assert (shown[0], shown[-1]) == (0, count - 1)
    steps = np.diff(shown)
    assert steps.min(initial=1) >= 1
    assert steps.max(initial=1) - steps.min(initial=steps.max(initial=1)) <= 1


def test_a_video_of_one_frame_scores_as_its_image():
    images = as_videos([[3], [200], [0]])
    still, moving = (
        Scorer(((Watched(), 1.0),))(pictures, PROMPTS) for pictures in (images[:, 0], images)
    )
    assert np.array_equal(still.reward, moving.reward, equal_nan=True)
    assert moving.failures == [None, None, f"grey: frame 0: black, {PROMPTS[2].prompt}"]


def test_a_frame_that_failed_fails_its_video_and_is_named():
    greys = np.full((3, 15), 9)
    greys[1, 4] = 0  # the third of the frames 0, 2, 4, ... 14
    greys[2, [4, 14]] = 0
    greys[0, 3] = 0  # not looked at
    table = Scorer(((Watched(), 1.0),), (Fixed("guardrail", np.arange(24.0)),))(
        as_videos(greys), PROMPTS
    )
    text = f"black, {PROMPTS[1].prompt}"
    assert np.array_equal(table.reward, [9, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(table.metrics["squared"], [81, np.nan, np.nan], equal_nan=True)
    assert table.metrics["guardrail"] == pytest.approx([3.5, 11.5, 19.5])
    assert table.failures == [
        None,
        f"grey: frame 4: {text}",
        f"grey: frame 4: {text} (and 1 more of 8 frames)",
    ]
    require_scored_share(table, limit=0.67)
    with pytest.raises(RewardError, match=r"2 of 3 images .*frame 4: black"):
        require_scored_share(table, limit=0.66)


def test_no_videos_are_no_failure():
    table = Scorer(((Watched(), 1.0),))(as_videos([[1, 2]])[:0], [])
    assert table.reward.shape == table.metrics["squared"].shape == (0,)
    assert table.failures == []


def test_real_rewards_score_a_still_video_as_its_image(clean):
    images, prompts = (part[:3] for part in clean)
    scorer = load_scorer(
        [configure_reward("ocr")],
        [configure_reward("similarity"), configure_reward("jpeg_compressibility")],
    )
    still = scorer(images, prompts)
    moving = scorer(np.repeat(images[:, None], 3, axis=1), prompts)
    assert list(moving.metrics) == list(still.metrics)
    for name, values in still.metrics.items():
        assert moving.metrics[name] == pytest.approx(values)


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


class OfTheirImages(Reward):
    """Scores images by their first pixel, and says which prompts it was asked about; a pixel of 0
    is a failure.
    """

    has_gradient = True

    def __init__(self, name):
        self.name = name
        self.asked = []

    def __call__(self, images, prompts):
        self.asked.append([prompt.prompt_id for prompt in prompts])
        values = images[:, 0, 0, 0].astype(float)
        lost = np.flatnonzero(values == 0)
        values[lost] = np.nan
        return RewardResult(
            values, {f"{self.name}_half": values / 2}, {int(index): "black" for index in lost}
        )

    def score_with_gradient(self, images, prompts):
        self.asked.append([prompt.prompt_id for prompt in prompts])
        return images[:, 0, 0, 0]


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


class Motion(Reward):
    """Mean change from frame to frame; a still video is a failure."""

    scores = "videos"

    def __init__(self):
        self.shapes = []

    def __call__(self, videos, prompts):
        self.shapes.append(videos.shape)
        values = np.abs(np.diff(videos.astype(float), axis=1)).mean((1, 2, 3, 4))
        still = np.flatnonzero(values == 0)
        values[still] = np.nan
        return RewardResult(
            values, {"fastest": values * 2}, {int(index): "nothing moves" for index in still}
        )


def test_a_reward_of_videos_gets_all_frames_beside_one_of_frames():
    made = load_reward(configure_reward(f"{__name__}:Motion", label="motion"))
    greys = 1 + np.arange(20) * np.array([[1], [3], [0]])
    table = Scorer(((made, 1.0), (Watched(), 2.0)))(as_videos(greys), PROMPTS)
    assert made.shapes == [(3, 20, 4, 6, 3)]
    assert table.metrics["fastest"][:2].tolist() == [2.0, 6.0]
    assert table.reward[:2] == pytest.approx([1, 3] + 2 * table.metrics["grey"][:2])
    assert table.failures == [None, None, "motion: nothing moves"]
    with pytest.raises(
        RewardError,
        match="'motion' scores videos and got images; set model.frames, or leave it out",
    ):
        Scorer(((made, 1.0),))(IMAGES, PROMPTS)


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
