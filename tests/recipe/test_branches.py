"""Branches of a round, as a recipe says them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.branches import branches_teaching, find_stages_in_parallel
from ebbflow.recipe.digest import select_set_keys
from ebbflow.stage import StageContext

MIXTURE = [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]
TEACHERS = {"words": "branch:words", "signs": "branch:signs"}
MERGE = {"kind": "online", "algorithm": {"name": "distillation", "teachers": TEACHERS}}
BRANCHES: dict[str, Any] = {
    "words": {"prompts": ["words"]},
    "signs": {"prompts": ["signs"], "rewards": [{"name": "jpeg_compressibility"}]},
}
STAGES = [
    {"kind": "offline"},
    {"branch": "words"},
    {"kind": "offline", "branch": "signs"},
    {"branch": "words"},
    MERGE,
]


def branched(
    stages: list[dict[str, Any]] = STAGES, branches: dict[str, Any] = BRANCHES, **rest: Any
) -> dict[str, Any]:
    kinds = [{"kind": "online"} | stage for stage in stages]
    return {"prompts": {"mixture": MIXTURE}, "branches": branches, "stages": kinds} | rest


def labels_in_parallel(recipe: Recipe, round: int, stage: int) -> list[str]:
    parallel = find_stages_in_parallel(recipe.stages, stage)
    return [recipe.stage_label(round, index) for index in parallel]


def test_a_branch_has_prompts_and_rewards_of_its_own() -> None:
    recipe = Recipe.model_validate(branched())
    assert [recipe.stage_label(1, index) for index in range(5)] == [
        "2.1 offline",
        "2.2 online words",
        "2.3 offline signs",
        "2.4 online words",
        "2.5 online",
    ]
    shown = [
        (
            ctx.branch_recipe.prompts.prompt_set_labels,
            [reward.name for reward in ctx.branch_recipe.rewards],
        )
        for ctx in (StageContext(recipe, 0, index) for index in range(3))
    ]
    assert shown == [
        (["words", "signs"], ["ocr"]),
        (["words"], ["ocr"]),
        (["signs"], ["jpeg_compressibility"]),
    ]
    assert StageContext(recipe, 0, 1).branch_recipe.prompts.count_by_prompt_set(8) == {"words": 8}
    assert [branches_teaching(stage) for stage in recipe.stages] == [
        [],
        [],
        [],
        [],
        ["words", "signs"],
    ]
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_stages_of_other_branches_run_beside_it() -> None:
    recipe = Recipe.model_validate(branched())
    parallel = [labels_in_parallel(recipe, 1, index) for index in range(5)]
    of_words, merge = (
        ["2.3 offline signs"],
        ["2.5 online"],
    )  # the merge waits, so its checkpoints do not exist yet
    assert parallel == [
        [],
        of_words + merge,
        ["2.2 online words", "2.4 online words", *merge],
        of_words + merge,
        [],
    ]


def test_stages_that_do_not_wait_for_a_branch_run_beside_it() -> None:
    first = {"algorithm": {"name": "distillation", "teacher": "branch:words"}}
    stages: list[dict[str, Any]] = [{"branch": "words"}, {"branch": "signs"}, first, {}, MERGE]
    recipe = Recipe.model_validate(branched(stages))
    parallel = [labels_in_parallel(recipe, 0, index) for index in range(5)]
    assert parallel[1] == ["1.1 online words", "1.3 online", "1.4 online", "1.5 online"]
    assert parallel[2:] == [["1.2 online signs"], ["1.2 online signs"], []]


def test_a_recipe_without_branches_is_what_it_was() -> None:
    """Its digest is in every artifact."""
    stage = {"kind": "online", "algorithm": {"name": "distillation", "teacher": "x"}}
    recipe = Recipe.model_validate({"stages": [stage, {"kind": "offline"}]})
    text = json.dumps(select_set_keys(recipe))
    assert "branch" not in text
    assert "teachers" not in text


def test_branches_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "prompts: {mixture: [{name: a, source: a.txt}]}\nbranches: {a: {}}\nstages:\n  - {kind:"
        " online, branch: a}\n  - {kind: online, algorithm: {name: distillation, teachers: {a:"
        " branch:a}}}\n"
    )
    assert load_recipe(tmp_path / "recipe.yaml").stages[1].hyper_parameters.teachers == {
        "a": "branch:a"
    }


WRONG = {
    "no such branch": (
        [{"branch": "wrods"}, *STAGES],
        BRANCHES,
        r"stages.0.branch = 'wrods': no such branch; .* words, signs",
    ),
    "no stage": (
        STAGES,
        BRANCHES | {"more": {}},
        r"branches.more has no stage; give stages branch: more",
    ),
    "nobody learns": (
        STAGES[:-1] + [{}],
        BRANCHES,
        r"nothing learns from branches.words; name branch:words among the teachers",
    ),
    "learns too early": (
        [MERGE, *STAGES],
        BRANCHES,
        r"stages.0 learns from branch:words, of which no stage before it is",
    ),
    "not together": (
        [{"branch": "words"}, {"branch": "signs"}, {}, {"branch": "words"}, MERGE],
        BRANCHES,
        r"stages.2 is between stages of branches.words and in no branch; move it",
    ),
    "from another": (
        [
            {"branch": "words"},
            {"branch": "signs", "algorithm": {"name": "distillation", "teacher": "branch:words"}},
            MERGE,
        ],
        BRANCHES,
        (
            r"stages.1 is in a branch and cannot learn from branch:words; take a policy folder or"
            r" its URI"
        ),
    ),
    "no such set": (
        STAGES,
        BRANCHES | {"words": {"prompts": ["wrods"]}},
        r"branches.words.prompts: .* no set 'wrods', only words",
    ),
    "pairs": (
        [
            {
                "kind": "offline",
                "branch": "words",
                "pairs": "p.jsonl",
                "algorithm": {"name": "diffusion_dpo"},
            },
            *STAGES[1:],
        ],
        BRANCHES,
        r"stages.0 trains on pairs or data, whose prompts are of no branch; take branch: words out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_a_branch_is_refused(case: str) -> None:
    stages, branches, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate(branched(stages, branches, guardrails=["tesseract"]))


def test_a_branch_cannot_train_on_a_guardrail_that_the_recipe_names() -> None:
    branches = {"words": {"rewards": [{"name": "tesseract"}]}, "signs": {}}
    with pytest.raises(RecipeError, match=r"tesseract.* cannot be trained on"):
        Recipe.model_validate(branched(STAGES, branches, guardrails=["tesseract"]))
    # A default guardrail gives way to the branch that trains on it.
    recipe = Recipe.model_validate(branched(STAGES, branches))
    assert [guardrail.column for guardrail in recipe.guardrails] == ["similarity"]


@pytest.mark.parametrize("named", [False, True])
def test_the_guardrails_of_a_branch_are_default_where_those_of_the_run_are(named: bool) -> None:
    mixture = [{"name": name, "source": f"{name}.txt"} for name in ("letters", "scenes")]
    rewards = [
        {"name": "similarity", "prompts": ["letters"]},
        {"name": "pickscore", "path": "/models/pickscore", "prompts": ["scenes"]},
    ]
    settings = {
        "model": {"family": "mine.family:Own", "path": "base"},
        "prompts": {"mixture": mixture},
        "rewards": rewards,
        "branches": {name: {"prompts": [name]} for name in ("letters", "scenes")},
        "stages": [
            {"kind": "online", "branch": "letters"},
            {"kind": "online", "branch": "scenes"},
            {
                "kind": "online",
                "algorithm": {
                    "name": "distillation",
                    "teachers": {name: f"branch:{name}" for name in ("letters", "scenes")},
                },
            },
        ],
    }
    if named:
        settings["guardrails"] = ["tesseract", "jpeg_incompressibility"]
    recipe = Recipe.model_validate(settings)
    for name in ("letters", "scenes"):
        view = recipe.select_branch(name)
        # The scenes do not train on similarity, which is no guardrail of the run all the same.
        assert view.guardrails == recipe.guardrails
        assert view.has_default_guardrails is not named
        assert view.select_scorable_guardrails(num_texts=0) == (recipe.guardrails if named else [])
        assert view.canonical_json.count("run_has_default") == 0


def test_a_branch_has_the_rewards_and_guardrails_of_its_sets() -> None:
    sets = ("words", "signs")
    own_sets = {name: {"prompts": [name]} for name in sets}
    rewards = [{"name": "similarity", "label": f"like_{name}", "prompts": [name]} for name in sets]
    guardrails = [{"name": "ocr", "label": f"reads_{name}", "prompts": [name]} for name in sets]
    recipe = Recipe.model_validate(
        branched(STAGES, own_sets, rewards=rewards, guardrails=guardrails)
    )
    for name in sets:
        own = recipe.select_branch(name)
        assert [config.column for config in (*own.rewards, *own.guardrails)] == [
            f"like_{name}",
            f"reads_{name}",
        ]
    other = own_sets | {
        "signs": {"prompts": ["signs"], "rewards": [{"name": "pickscore", "prompts": ["words"]}]}
    }
    with pytest.raises(
        RecipeError,
        match=(
            r"branches.signs.rewards: pickscore.prompts names the prompt set 'words', .* are signs"
        ),
    ):
        Recipe.model_validate(branched(STAGES, other))
