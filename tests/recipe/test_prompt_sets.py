"""Prompt sets of a mixture: their shares of a step, and the teachers and rewards of each."""

from __future__ import annotations

import pytest

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.prompts import PromptsConfig


@pytest.mark.parametrize(
    ("weights", "prompts", "counts"),
    [
        ([1], 5, [5]),
        ([3, 1], 8, [6, 2]),
        ([1, 1, 1], 8, [3, 3, 2]),
        ([0.5, 0.3, 0.2], 7, [4, 2, 1]),
        ([9, 1], 4, [4, 0]),
    ],
)
def test_prompt_sets_have_whole_shares(weights, prompts, counts):
    """3.5, 2.1 and 1.4 of 7: the largest remainder is the first's."""
    sets = [{"source": f"{index}.txt", "weight": weight} for index, weight in enumerate(weights)]
    assert list(PromptsConfig(mixture=sets).count_by_prompt_set(prompts).values()) == counts
    assert PromptsConfig().count_by_prompt_set(prompts) == {}


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            {"source": "a.txt", "mixture": [{"source": "b.txt"}]},
            "source and mixture both name files",
        ),
        ({"mixture": [{"source": "x/a.txt"}, {"source": "y/a.txt"}]}, "mixture has a.txt twice"),
        (
            {"mixture": [{"source": "a.txt", "weight": 99}, {"source": "b.txt"}]},
            "stages.0.prompts_per_step = 8 gives the prompt set b",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_explained(prompts, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate({"prompts": prompts})


def taught(teachers, *sets):
    stage = {"kind": "online", "algorithm": {"name": "distillation", "teachers": teachers}}
    return {
        "prompts": {"mixture": [{"name": name, "source": f"{name}.txt"} for name in sets]},
        "stages": [stage],
    }


def test_every_prompt_set_may_have_its_own_teacher():
    recipe = Recipe.model_validate(
        taught({"words": "s3://bucket/a", "signs": "b"}, "signs", "words")
    )
    assert recipe.stages[0].hyper_parameters.teachers == {"words": "s3://bucket/a", "signs": "b"}
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("teachers", "sets", "message"),
    [
        (
            {"words": "a"},
            ("words", "signs"),
            "teachers = words: the prompt set signs has no teacher; name one for every set",
        ),
        (
            {"words": "a", "sings": "b"},
            ("words", "signs"),
            "prompts.mixture has no set 'sings', only words, signs",
        ),
        ({"words": "a"}, (), "prompts.mixture has no set 'words', only no sets"),
    ],
)
def test_a_teacher_is_of_a_prompt_set(teachers, sets, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate(taught(teachers, *sets))


def test_a_stage_of_pairs_takes_no_share_of_a_mixture():
    """It reads its prompts from the pairs, and ``prompts`` stands for nothing there."""
    mixture = {"mixture": [{"source": "a.txt", "weight": 999}, {"source": "b.txt"}]}
    stage = {"kind": "offline", "algorithm": {"name": "diffusion_dpo"}, "prompts": 64}
    with pytest.raises(
        RecipeError, match=r"stages.0.prompts = 64 gives the prompt set b.txt less than one prompt"
    ):
        Recipe.model_validate({"prompts": mixture, "stages": [stage]})
    recipe = Recipe.model_validate(
        {"prompts": mixture, "stages": [stage | {"pairs": "pairs.jsonl"}]}
    )
    assert recipe.prompts.count_by_prompt_set(64) == {"a.txt": 64, "b.txt": 0}


def rewarded(rewards, *sets, **rest):
    return {
        "prompts": {"mixture": [{"name": name, "source": f"{name}.txt"} for name in sets]},
        "rewards": rewards,
    } | rest


def test_prompt_sets_may_have_their_own_rewards():
    rewards = [
        {"name": "ocr", "prompts": ["words"]},
        {"name": "jpeg_compressibility", "prompts": ["signs"], "weight": 2},
    ]
    recipe = Recipe.model_validate(rewarded(rewards, "words", "signs"))
    assert [config.applies_to("signs") for config in recipe.rewards] == [False, True]
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


JUDGE = {"name": "pairwise_judge", "url": "http://localhost", "model": "m"}


def test_held_out_prompts_of_a_file_of_their_own_have_a_reward():
    prompts = {
        "mixture": [{"name": "words", "source": "a.txt"}],
        "held_out_source": "b.txt",
        "held_out": 4,
    }
    with pytest.raises(
        RecipeError, match="rewards: each names prompt sets, and prompts.held_out_source is none"
    ):
        Recipe.model_validate(
            {"prompts": prompts, "rewards": [{"name": "ocr", "prompts": ["words"]}]}
        )


@pytest.mark.parametrize(
    ("rewards", "sets", "message"),
    [
        (
            [{"name": "ocr", "prompts": ["wrods"]}],
            ("words",),
            "rewards: ocr.prompts names the prompt set 'wrods', and there are words",
        ),
        (
            [{"name": "ocr", "prompts": ["words"]}],
            (),
            "ocr.prompts names the prompt set 'words', and there are none",
        ),
        (
            [{"name": "ocr", "prompts": ["words"]}],
            ("words", "signs"),
            "rewards: none of them scores the prompt set signs; add it to",
        ),
        (
            [{"name": "ocr", "prompts": ["words"]}, JUDGE],
            ("words", "signs"),
            "or all of a prompt set, compare the images",
        ),
    ],
)
def test_every_prompt_set_has_a_reward(rewards, sets, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate(rewarded(rewards, *sets))


def test_a_guardrail_need_not_watch_all_sets():
    guardrails = [{"name": "tesseract", "prompts": ["words"]}]
    assert Recipe.model_validate(rewarded(["ocr"], "words", "signs", guardrails=guardrails))
    with pytest.raises(
        RecipeError,
        match=r"guardrails: tesseract.prompts names the prompt set 'words', and there are signs",
    ):
        Recipe.model_validate(rewarded(["ocr"], "signs", guardrails=guardrails))
