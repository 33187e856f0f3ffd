"""Recipes: strict, explained, immutable, and the same however they were written down."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.base import Strict
from ebbflow.recipe.digest import compute_digest, select_set_keys
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.key_docs import group_keys, read_field_docs
from ebbflow.recipe.promotion import GuardrailToleranceConfig
from ebbflow.recipe.prompts import PromptsConfig
from ebbflow.recipe.stages import OnlineStageConfig
from tests.nested import paths, replaced

SHIPPED = sorted((Path(__file__).parents[2] / "workflows" / "recipes").glob("*.yaml"))


def problem(data):
    """What is wrong with a recipe, in its own words."""
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(data)
    return str(error.value)


def one_stage(**stage):
    return {"stages": [stage]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path):
    recipe = load_recipe(path)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_the_default_recipe_is_complete():
    recipe = Recipe()
    assert [recipe.stage_label(r, s) for r in (0, 1) for s in (0, 1)] == [
        "1.1 online",
        "1.2 offline",
        "2.1 online",
        "2.2 offline",
    ]
    assert Recipe.model_validate({}) == recipe


@pytest.mark.parametrize(
    ("data", "path", "nearest"),
    [
        ({"sed": 1}, "sed", "seed"),
        ({"polcy": {}}, "polcy", "policy"),
        ({"policy": {"rnk": 4}}, "policy.rnk", "rank"),
        ({"model": {"training": {"heigth": 16}}}, "model.training.heigth", "height"),
        ({"rewards": [{"name": "ocr", "wieght": 2}]}, "rewards.0.ocr.wieght", "weight"),
        (one_stage(kind="online", step=3), "stages.0.online.step:", "steps"),
        (one_stage(kind="offline", epoch=3), "stages.0.offline.epoch", "epochs"),
        (one_stage(kind="online", window={"stryde": 2}), "stages.0.online.window.stryde", "stride"),
        (
            one_stage(kind="offline", algorithm={"name": "diffusion_nft", "bta": 1}),
            "stages.0.offline.algorithm.diffusion_nft.bta",
            "beta",
        ),
        (
            one_stage(kind="offline", algorithm={"name": "awm", "sigmas": "uniform"}),
            "stages.0.offline.algorithm.awm.sigmas",
            "sigma",
        ),
        (
            one_stage(
                kind="offline", algorithm={"name": "awm", "sigma": {"kind": "uniform", "shft": 3}}
            ),
            "stages.0.offline.algorithm.awm.sigma.shft",
            "shift",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(data, path, nearest):
    text = problem(data)
    assert path in text
    assert f"unknown key; did you mean {nearest!r}?" in text
    assert nearest in text.split("Known keys here:")[1]


def test_a_key_like_no_other_gets_the_list():
    text = problem({"policy": {"zzz": 1}})
    assert "did you mean" not in text
    assert (
        "Known keys here: alpha, dora, ema, init, layers, rank, rslora, start, targets, train"
        in text
    )


def test_every_problem_is_named_at_once():
    text = problem({"seed": -1, "rounds": "many", "polcy": 1})
    assert all(name in text for name in ("seed = -1", "rounds = 'many'", "polcy: unknown key"))


@pytest.mark.parametrize(
    ("data", "explanation"),
    [
        (
            {"prompts": {"count": 10, "validation": 4, "held_out": 6}},
            "validation + held_out = 10 leaves nothing of count = 10",
        ),
        ({"rewards": [{"name": "ocr"}, {"name": "ocr"}]}, "each reward may be named once"),
        (
            {"rewards": [{"name": "tesseract"}], "guardrails": ["tesseract"]},
            "['tesseract'] cannot be trained on and be a guardrail",
        ),
        (
            {"promotion": {"guardrail_tolerance": 0.02}},
            (
                "promotion.guardrail_tolerance = 0.02: one number does not fit the scales of all"
                " guardrails; give {default: ...} in standard deviations, or {absolute: {tesseract:"
                " 0.02}}"
            ),
        ),
        (
            {"promotion": {"guardrail_tolerance": {"absolute": {"similarty": 0.02}}}},
            (
                "promotion.guardrail_tolerance.absolute.similarty: no such guardrail; did you mean"
                " 'similarity'? It has tesseract, similarity"
            ),
        ),
        (
            {"promotion": {"guardrail_tolerance": {"standard_deviations": {"similarity": -1}}}},
            (
                "promotion.guardrail_tolerance.standard_deviations.similarity = -1: Input should be"
                " greater than or equal to 0"
            ),
        ),
        (
            {
                "promotion": {
                    "guardrail_tolerance": {
                        "absolute": {"tesseract": 1},
                        "standard_deviations": {"tesseract": 1},
                    }
                }
            },
            "promotion.guardrail_tolerance: tesseract has two tolerances; keep one of them",
        ),
        ({"rewards": []}, "rewards"),
        ({"stages": []}, "stages"),
        (
            one_stage(
                kind="online",
                sampler={"name": "cps", "steps": 4},
                window={"kind": "fixed", "start": 2, "size": 2},
            ),
            "start + size = 4 must be below sampler.steps = 4",
        ),
        (
            one_stage(kind="online", sampler={"name": "cps", "steps": 4}),
            "start + size = 4 must be below sampler.steps = 4",
        ),
        (one_stage(kind="offline", prompts=2, shards=3), "3 shards for 2 prompts leave some empty"),
        (one_stage(kind="online", algorithm={"name": "ppo"}), "stages.0.online.algorithm"),
        (one_stage(kind="hybrid"), "stages.0"),
        (
            one_stage(
                kind="offline",
                algorithm={"name": "dgpo", "sigma": {"kind": "uniform", "min": 0.5, "max": 0.2}},
            ),
            (
                "stages.0.offline.algorithm.dgpo.sigma: min = 0.5 is not below max = 0.2, so no"
                " sigma is left; lower min or raise"
            ),
        ),
        (
            one_stage(
                kind="online", algorithm={"name": "awm", "sigma": {"kind": "schedule", "shift": 3}}
            ),
            (
                "stages.0.online.algorithm.awm.sigma: shift = 3: the sampler's schedule is shifted"
                " by its family; leave shift out"
            ),
        ),
        (
            one_stage(
                kind="online", algorithm={"name": "awm", "sigma": {"kind": "schedule", "min": 1.5}}
            ),
            (
                "stages.0.online.algorithm.awm.sigma.min = 1.5: Input should be less than or equal"
                " to 1"
            ),
        ),
        ({"seed": 2**31}, "seed"),
        ({"name": "../x"}, "name"),
        ({"promotion": {"model_name": "a/b"}}, "promotion.model_name"),
        ({"model": {"training": {"height": 20}}}, "model.training.height = 20"),
    ],
)
def test_each_rule_explains_itself(data, explanation):
    assert explanation in problem(data)


@pytest.mark.parametrize(
    "data",
    [
        {"prompts": {"count": 11, "validation": 4, "held_out": 6}},
        {"prompts": {"source": "prompts.txt", "count": 10, "validation": 4, "held_out": 6}},
        {"rewards": [{"name": "tesseract"}], "guardrails": ["ocr"]},
        {
            "guardrails": [{"name": "similarity", "label": "looks"}],
            "promotion": {"guardrail_tolerance": {"default": 0, "absolute": {"looks": 2}}},
        },
        one_stage(
            kind="online",
            sampler={"name": "cps", "steps": 5},
            window={"kind": "fixed", "start": 2, "size": 2},
        ),
        one_stage(kind="online", sampler={"name": "cps", "steps": 2}, window={"kind": "all"}),
        one_stage(kind="offline", prompts=3, shards=3),
    ],
)
def test_what_keeps_to_the_rules_is_a_recipe(data):
    Recipe.model_validate(data)


def test_the_tolerances_of_the_page_are_those_of_a_recipe():
    page = (Path(__file__).parents[2] / "docs" / "promotion.md").read_text()
    (block,) = [
        block
        for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
        if "guardrail_tolerance" in block
    ]
    tolerance = Recipe.model_validate(yaml.safe_load(block)).promotion.guardrail_tolerance
    assert tolerance.default == GuardrailToleranceConfig().default
    assert (tolerance.standard_deviations, tolerance.absolute) == (
        {"ocr": 0.05},
        {"jpeg_incompressibility": 0.001},
    )


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    "key",
    [
        "stop.min_delta",
        "promotion.guardrail_tolerance.default",
        "model.training.lr",
        "max_failed_share",
        "evaluation.confidence",
    ],
)
def test_numbers_that_are_not_finite_are_refused(key, number):
    data = yaml.safe_load(number)
    for part in reversed(key.split(".")):
        data = {part: data}
    assert key in problem(data)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_stages_and_rewards_take_only_finite_numbers(number):
    problem({"rewards": [{"name": "ocr", "weight": number}]})
    problem(one_stage(kind="online", optimizer={"weight_decay": number}))
    problem(one_stage(kind="online", optimizer={"max_grad_norm": number}))
    problem(one_stage(kind="online", advantages={"clip": number}))
    problem(one_stage(kind="online", reference={"weight": number}))
    problem(one_stage(kind="online", correction={"high": number}))
    problem(one_stage(kind="offline", algorithm={"name": "diffusion_nft", "beta": number}))
    problem(one_stage(kind="offline", algorithm={"name": "awm", "old": {"slope": number}}))


def test_a_recipe_never_changes():
    recipe = Recipe()
    with pytest.raises(ValidationError):
        recipe.seed = 1
    with pytest.raises(ValidationError):
        recipe.stages[0].optimizer.lr = 0.0


WRITTEN = {
    "name": "x",
    "seed": 4,
    "stages": [
        {"kind": "online", "steps": 3, "optimizer": {"lr": 1e-4, "weight_decay": 0.1}},
        {"kind": "offline"},
    ],
    "rewards": [{"name": "ocr", "weight": 2}, {"name": "similarity"}],
    "guardrails": [],
}


def reversed_keys(value):
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def test_the_digest_is_that_of_the_meaning():
    recipe = Recipe.model_validate(WRITTEN)
    assert Recipe.model_validate(reversed_keys(WRITTEN)).digest == recipe.digest
    assert Recipe.model_validate(recipe.model_dump()).digest == recipe.digest
    assert (
        Recipe.model_validate(WRITTEN | {"threads": 1}).digest == recipe.digest
    )  # the default, written out
    assert (
        Recipe.model_validate(WRITTEN | {"stages": WRITTEN["stages"][::-1]}).digest != recipe.digest
    )
    digests = [
        Recipe.model_validate(WRITTEN | change).digest
        for change in ({"seed": 5}, {"output": "y"}, {"rounds": 2})
    ]
    assert len({recipe.digest, *digests}) == 4


@pytest.mark.parametrize(
    ("recipe", "digest"),
    [
        (Recipe(), "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
        (
            load_recipe(SHIPPED[0].with_name("glyph.yaml")),
            "8ea7d02a3205d92eab0051174db76da9935566c429fa673d4f148793dfdcc23b",
        ),
    ],
    ids=["defaults", "glyph"],
)
def test_a_new_key_leaves_the_digest_as_it_was(recipe, digest):
    """A run that was killed goes on, and an older one can be replayed, only with its own digest.
    Where a default changes on purpose, the changelog says that digests change.
    """
    assert recipe.digest == digest, select_set_keys(recipe)


class Leaf(Strict):
    size: int = 1


class Branch(Strict):
    kind: Literal["branch"] = "branch"
    leaf: Leaf = Leaf()
    leaves: list[Leaf] = []
    options: dict[str, Any] = {}


class LaterLeaf(Leaf):
    colour: str | None = None


class LaterBranch(Branch):
    leaf: LaterLeaf = LaterLeaf()
    leaves: list[LaterLeaf] = []
    names: list[str] = []
    other: LaterLeaf = LaterLeaf()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"leaf": {"size": 1}},
        {"leaf": {"size": 2}},
        {"leaves": [{}, {"size": 3}]},
        {"options": {"size": 1}},
    ],
)
def test_new_keys_with_their_defaults_change_no_digest(keys):
    branch = Branch.model_validate(keys)
    assert compute_digest(LaterBranch.model_validate(keys)) == compute_digest(branch)
    written_out = LaterBranch.model_validate(keys).model_dump()
    assert compute_digest(LaterBranch.model_validate(written_out)) == compute_digest(branch)


@pytest.mark.parametrize(
    "changed",
    [
        {"leaf": {"size": 2}},
        {"leaf": {"colour": "green"}},
        {"leaves": [{}]},
        {"leaves": [{"colour": "green"}]},
        {"options": {"size": 1}},
        {"names": [""]},
        {"other": {"size": 2}},
    ],
)
def test_a_changed_value_changes_the_digest(changed):
    digests = {compute_digest(LaterBranch.model_validate(keys)) for keys in ({}, changed)}
    assert len(digests) == 2


def test_keys_at_their_defaults_are_not_set_but_logged():
    recipe = Recipe.model_validate({"seed": 3, "threads": 1})
    assert select_set_keys(recipe) == {"seed": 3}
    assert json.loads(recipe.canonical_json).keys() == Recipe.model_fields.keys()


def test_stages_that_leave_everything_out_differ_by_their_kind():
    online, offline = (
        Recipe.model_validate({"stages": [{"kind": kind}]}) for kind in ("online", "offline")
    )
    assert select_set_keys(online)["stages"][0]["kind"] == "online"
    assert online.digest != offline.digest


def test_the_digest_tells_a_tree_that_is_left_out_from_the_default_one():
    stage = {"kind": "online", "algorithm": {"name": "branch_grpo"}}
    with_tree, without = (
        Recipe.model_validate({"stages": [stage | given]}) for given in ({}, {"tree": None})
    )
    assert with_tree.digest != without.digest
    assert Recipe.model_validate_json(without.canonical_json) == without
    assert Recipe.model_validate_json(with_tree.canonical_json) == with_tree


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_is_what_it_says(tmp_path, suffix):
    path = tmp_path / f"recipe{suffix}"
    path.write_text(json.dumps(WRITTEN) if suffix == ".json" else yaml.safe_dump(WRITTEN))
    assert load_recipe(path) == load_recipe(str(path)) == Recipe.model_validate(WRITTEN)


@pytest.mark.parametrize(
    ("content", "explanation"),
    [
        (b"[1, 2]", "must hold a mapping of recipe keys, got list"),
        (b"", "must hold a mapping of recipe keys, got NoneType"),
        (b"a: [", "not valid YAML"),
        (b"a: b: c", "not valid YAML"),
        (b"name: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (b"name: \x00", "not valid YAML"),
        (b"name: \xff\xfe\xfa", "YAML"),
        (b"name: 2021-13-45", "not valid YAML"),
        (b"seed: 1\nseed: 2", "seed"),
    ],
    ids=[
        "list",
        "empty",
        "open",
        "nested",
        "python",
        "null-byte",
        "not-utf8",
        "no-such-date",
        "key-twice",
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, explanation):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert explanation in str(error.value)


def test_missing_recipe_file_is_an_error_that_names_it(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(
            RecipeError, match="no recipe at .*ebbflow init FOLDER.*workflows/recipes/"
        ):
            load_recipe(path)


# Whatever a YAML file may hold, under the keys of a recipe or others.

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)


def recipe_or_explanation(data):
    try:
        recipe = Recipe.model_validate(data)
    except RecipeError as error:
        first, *problems = str(error).splitlines()
        return first == "this recipe cannot be run:" and bool(problems)
    return Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(Recipe.model_fields)), st.text(max_size=5), st.integers()),
        anything,
        max_size=4,
    )
)
def test_any_mapping_is_a_recipe_or_explained(data):
    assert recipe_or_explanation(data)


OWN_KEYS = {"latent_weights", "standard_deviations", "absolute", "lr_factors", "options"}
"""Mappings whose keys are the user's."""
COMPLETE = Recipe.model_validate(WRITTEN).model_dump(mode="json")


@given(st.sampled_from([path for path in paths(COMPLETE) if path]), anything)
def test_a_recipe_with_anything_in_one_place_is_a_recipe_or_explained(path, new):
    assert recipe_or_explanation(replaced(COMPLETE, path, new))


@given(st.sampled_from([path for path in paths(COMPLETE) if path]), st.text(max_size=8), anything)
def test_a_recipe_with_a_further_key_is_explained(path, key, new):
    inside = COMPLETE
    for part in path:
        inside = inside[part]
    if isinstance(inside, dict) and key not in inside and path[-1] not in OWN_KEYS:
        assert "unknown key" in problem(replaced(COMPLETE, path, inside | {key: new}))


def test_docstrings_of_fields_are_in_the_schema_also_where_a_class_inherits_or_redefines_them():
    class Base(Strict):
        kept: int = 1
        """What it is for."""
        changed: int = 1
        """Redefined
        below."""

    class Derived(Base):
        changed: int = 2
        own: int = 3

    assert read_field_docs(Derived) == {"kept": "What it is for.", "changed": "Redefined below."}
    described = {
        name: about.get("description")
        for name, about in Derived.model_json_schema()["properties"].items()
    }
    assert described == {"kept": "What it is for.", "changed": "Redefined below.", "own": None}


def test_every_key_of_a_stage_is_in_one_group() -> None:
    groups = group_keys(OnlineStageConfig)
    assert groups[""] == ["kind"]
    assert groups["algorithm, loss and optimiser"][0] == "algorithm"
    keys = [key for group in groups.values() for key in group]
    assert sorted(keys) == sorted(OnlineStageConfig.model_fields)


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


def test_a_reward_of_videos_needs_a_model_that_draws_them():
    judge = {"name": "videoalign", "path": "p", "processor": {"path": "q"}, "frame_rate": 16}
    model = {"family": "wan", "path": "w", "frames": 17}
    assert Recipe.model_validate(
        {"model": model, "rewards": ["jpeg_compressibility"], "guardrails": [judge]}
    ).guardrails
    for part in ({"rewards": [judge]}, {"guardrails": [judge]}):
        with pytest.raises(
            RecipeError,
            match=(
                r"videoalign scores videos, and model.frames = 1 draws images; raise it, or leave"
            ),
        ):
            Recipe.model_validate({"model": model | {"frames": 1}} | part)


@pytest.mark.parametrize(
    ("keys", "guardrails"),
    [
        ({}, ["tesseract", "similarity"]),
        ({"rewards": ["similarity"]}, ["tesseract"]),
        ({"rewards": [{"name": "similarity", "label": "likeness"}]}, ["tesseract"]),
        ({"rewards": [{"name": "ocr", "label": "similarity"}]}, ["tesseract"]),
        ({"rewards": ["tesseract", "similarity"]}, []),
        ({"model": {"family": "sd3", "path": "somewhere"}}, []),
        ({"model": {"family": "mine.family:Own", "path": "x"}}, ["tesseract", "similarity"]),
    ],
)
def test_default_guardrails_follow_family_and_rewards(
    keys: dict[str, object], guardrails: list[str]
) -> None:
    recipe = Recipe.model_validate(keys)
    assert [guardrail.column for guardrail in recipe.guardrails] == guardrails
    # A recipe travels as JSON with every key, and must mean the same where it arrives.
    arrived = Recipe.model_validate_json(recipe.canonical_json)
    assert arrived.has_default_guardrails
    assert arrived.digest == recipe.digest
    assert arrived.select_scorable_guardrails(num_texts=MIN_PROMPTS - 1) == []
    assert arrived.select_scorable_guardrails(num_texts=MIN_PROMPTS) == recipe.guardrails


def test_named_guardrails_are_never_left_out() -> None:
    recipe = Recipe.model_validate({"guardrails": ["tesseract", "jpeg_incompressibility"]})
    assert recipe.select_scorable_guardrails(num_texts=0) == recipe.guardrails


def test_code_beside_the_recipe_and_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "sampler_beside.py").write_text("from ebbflow.flow.samplers.ode import SAMPLER\n")
    (tmp_path / "sampler_here.py").write_text("from ebbflow.flow.samplers.ode import SAMPLER\n")
    monkeypatch.chdir(tmp_path)
    for module in ("sampler_beside", "sampler_here"):
        (folder / "recipe.yaml").write_text(f"evaluation: {{sampler: '{module}:SAMPLER'}}\n")
        assert load_recipe("recipes/recipe.yaml").evaluation.sampler == f"{module}:SAMPLER"
    # Last, so that a file of the user's hides no installed package.
    assert sys.path[-2:] == [str(folder), str(tmp_path)]


def test_a_folder_of_pythonpath_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    before = list(sys.path)
    monkeypatch.chdir(tmp_path)
    load_recipe("recipe.yaml")
    assert sys.path == before
