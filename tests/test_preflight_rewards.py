"""What a preflight check says about prompts, and the rewards and guardrails that score them."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from ebbflow import preflight
from ebbflow.data.prompts import Prompt, PromptError
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.rewards.base import NO_TARGET, Reward, RewardError, RewardResult
from tests.preflight_cases import PLAIN, SERVER, SMALL, on_plain_prompts


def with_prompts(tmp_path: Path, text: str, **keys: object) -> Recipe:
    (tmp_path / "prompts.txt").write_text(text)
    return Recipe.model_validate(
        {"output": str(tmp_path), "prompts": {"source": str(tmp_path / "prompts.txt")}} | keys
    )


def test_a_held_out_file_is_read_and_a_reward_tried_on_it(tmp_path: Path) -> None:
    (tmp_path / "judged.jsonl").write_text(
        "".join(f'{{"prompt": "\\"Z{letter}\\""}}\n' for letter in "ABCDE")
    )
    prompts = {"held_out_source": str(tmp_path / "judged.jsonl"), "held_out": 5}
    recipe = Recipe.model_validate({"output": str(tmp_path), "prompts": prompts})
    prepared = preflight.read_prompt_table(recipe, on_cluster=False)
    assert prepared
    tried = preflight._choose_tried_prompts(recipe, prepared[0])
    assert [prompt.split == "held_out" for prompt in tried] == [False, False, True]
    check_recipe(recipe, SERVER, on_cluster=False)
    missing = Recipe.model_validate(
        {"output": str(tmp_path), "prompts": prompts | {"held_out_source": "nowhere.csv"}}
    )
    with pytest.raises(
        RecipeError,
        match=(
            r"prompts\.held_out_source = 'nowhere\.csv': no such file; .* hold out prompts of the"
        ),
    ):
        check_recipe(missing, SERVER, on_cluster=False)
    with pytest.raises(
        RecipeError, match=r"prompts\.held_out_source = 'nowhere\.csv' is a local path"
    ):
        check_recipe(
            missing.model_copy(update={"output": "s3://bucket/runs"}), SERVER, on_cluster=True
        )
    elsewhere = Recipe.model_validate(
        {"output": str(tmp_path), "prompts": prompts | {"held_out_source": "s3://b/geneval.jsonl"}}
    )
    assert preflight.read_prompt_table(elsewhere, on_cluster=False) is None


def test_prompts_are_read_as_the_run_will(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="name no text to read"):
        check_recipe(with_prompts(tmp_path, "a cat\na dog\n"), SERVER, on_cluster=False)
    with pytest.raises(PromptError, match=r"prompts.* held_out"):
        check_recipe(with_prompts(tmp_path, '"A"\n"B"\n'), SERVER, on_cluster=False)


@pytest.mark.parametrize("on_cluster", [True, False])
def test_a_prompt_file_that_ebbflow_does_not_ship(tmp_path: Path, on_cluster: bool) -> None:
    recipe = Recipe.model_validate(
        {"output": "s3://bucket", "prompts": {"source": "ebbflow:datasets/sings/prompts.txt"}}
    )
    with pytest.raises(
        RecipeError,
        match=(
            r"Ebbflow ships no such file; take .* ebbflow:datasets/signs/prompts\.txt or ebbflow:"
        ),
    ):
        check_recipe(recipe, SERVER, on_cluster)


def test_an_algorithm_on_the_gradient_of_the_reward_needs_rewards_that_have_one(
    tmp_path: Path,
) -> None:
    stages = [{"kind": "online", "algorithm": {"name": "draft"}}]
    recipe = {
        "output": str(tmp_path),
        "rewards": ["similarity"],
        "guardrails": [],
        "stages": stages,
    }
    with pytest.raises(
        RewardError,
        match="draft learns from the gradient of the rewards, and 'similarity' has none; train on",
    ):
        check_recipe(Recipe.model_validate(recipe), SERVER, on_cluster=False)


class OnlySigns(Reward):
    """A reward that cannot score other prompts."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        assert [prompt.source for prompt in prompts] == ["signs", "signs"]
        return RewardResult(np.zeros(len(images)))


def test_a_reward_of_a_prompt_set_is_tried_on_its_prompts(tmp_path: Path) -> None:
    for name in ("words", "signs"):
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(f'"{name[0]}{other}"' for other in "cdefghijkl")
        )
    sets = [{"name": name, "source": str(tmp_path / f"{name}.txt")} for name in ("words", "signs")]
    settings = {
        "output": str(tmp_path),
        "prompts": {"mixture": sets, "validation": 1, "held_out": 2},
        "rewards": [
            {"name": "similarity", "prompts": ["words"]},
            {"name": f"{__name__}:OnlySigns", "prompts": ["signs"]},
        ],
        "stages": [{"kind": "online", "prompts_per_step": 2}],
        "guardrails": [],
    }
    check_recipe(Recipe.model_validate(settings), SERVER, on_cluster=False)


def test_default_guardrails_that_read_are_left_out_of_prompts_without_text(tmp_path: Path) -> None:
    recipe = on_plain_prompts(tmp_path)
    notes = check_recipe(recipe, SERVER, on_cluster=False)
    assert [note for note in notes if "guardrails" in note] == [
        (
            "guardrails are left out by default where they cannot be scored: tesseract,"
            " similarity, as 0 of 8 held-out prompts name a text to read"
        )
    ]


def test_a_guardrail_of_few_held_out_prompts_is_refused(tmp_path: Path) -> None:
    """The gate would refuse every policy of the run at its end."""
    texts = "".join(f'a sign that says "SIGN {number}"\n' for number in range(4))
    plain = "".join(f"a drawing of {number} dogs\n" for number in range(20))
    (tmp_path / "judged.txt").write_text(texts + plain)
    (tmp_path / "plain.txt").write_text(PLAIN)
    prompts = {
        "source": str(tmp_path / "plain.txt"),
        "held_out_source": str(tmp_path / "judged.txt"),
        "validation": 4,
        "held_out": MIN_PROMPTS,
    }
    recipe = on_plain_prompts(tmp_path, prompts=prompts, guardrails=["similarity"])
    with pytest.raises(
        PromptError, match="similarity can score 4 of 24 held-out prompts, and the gate compares 24"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


@pytest.mark.parametrize("guardrails", [["similarity"], ["ocr", "similarity"]])
def test_named_guardrails_that_nothing_can_be_scored_with_are_refused(
    tmp_path: Path, guardrails: list[str]
) -> None:
    recipe = on_plain_prompts(tmp_path, guardrails=guardrails)
    with pytest.raises(
        PromptError,
        match=(
            rf"guardrails: {guardrails[0]} can score 0 of 8 held-out prompts, and the gate compares"
            rf" 2, so that no policy of this run could be promoted where {guardrails[0]} can run;"
            r" take it out of 'guardrails'.* it names no text to read: quote the text"
        ),
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_a_reward_must_be_able_to_score_every_held_out_prompt(tmp_path: Path) -> None:
    geneval = {"name": "geneval", "path": "/m", "clip": {"path": "/c"}}
    with pytest.raises(
        PromptError,
        match=(
            r"the reward geneval can score 0 of 8 held-out prompts, and the gate promotes no policy"
            r" without a reward for each; .*no rules of GenEval"
        ),
    ):
        check_recipe(on_plain_prompts(tmp_path, rewards=[geneval]), SERVER, on_cluster=False)


class Reads(Reward):
    """A reward of my own that reads."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        reasons = dict.fromkeys(range(len(images)), NO_TARGET)
        return RewardResult(np.full(len(images), np.nan), failures=reasons)


class FindsNothing(Reward):
    """A reward of my own that finds no face in noise."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        reasons = dict.fromkeys(range(len(images)), "no face")
        return RewardResult(np.full(len(images), np.nan), failures=reasons)


def test_a_reward_of_ones_own_without_a_score_is_refused_only_for_its_prompts(
    tmp_path: Path,
) -> None:
    with pytest.raises(RewardError, match="scores none of the 2 prompts .* names no text"):
        check_recipe(
            on_plain_prompts(tmp_path, rewards=[f"{__name__}:Reads"]), SERVER, on_cluster=False
        )
    notes = check_recipe(
        on_plain_prompts(tmp_path, rewards=[f"{__name__}:FindsNothing"]), SERVER, on_cluster=False
    )
    assert any(
        "FindsNothing gave no score to any of 2 images of noise (no face)" in n for n in notes
    )


class Brightness(Reward):
    """A reward that reads no prompt."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        return RewardResult(images.mean((1, 2, 3)))


class Loudness(Reward):
    """A reward that reads prompts."""

    def __call__(self, images: np.ndarray, prompts: list[Prompt]) -> RewardResult:
        return RewardResult(images.mean((1, 2, 3)) + [len(prompt.prompt) for prompt in prompts])


@pytest.mark.parametrize(
    ("rewards", "warns"),
    [
        (["jpeg_compressibility", f"{__name__}:Brightness"], True),
        (["jpeg_compressibility", f"{__name__}:Loudness"], False),
        ([f"{__name__}:Brightness", "clipscore"], False),
    ],
)
def test_rewards_that_read_no_prompt_are_warned_of(
    tmp_path: Path, rewards: list[str], warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The network of CLIPScore is not on this machine.
    monkeypatch.setattr(preflight, "_check_rewards", lambda recipe: None)
    (tmp_path / "words.txt").write_text("".join(f"{'a' * n} cats\n" for n in range(1, 40)))
    prompts = {"source": str(tmp_path / "words.txt"), **SMALL}
    recipe = on_plain_prompts(tmp_path, prompts=prompts, rewards=rewards)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_recipe(recipe, SERVER, on_cluster=False)
    texts = [str(warning.message) for warning in caught]
    says = [text for text in texts if "no score depends on the prompt" in text]
    expected = "rewards: no score depends on the prompt (jpeg_compressibility, Brightness)"
    assert len(says) == warns
    assert all(text.startswith(expected) for text in says)
