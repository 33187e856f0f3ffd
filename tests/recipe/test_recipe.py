"""Recipes: strict, explained, immutable, and the same however they were written down."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from recipe_cases import SHIPPED, WRITTEN, one_stage, problem

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.base import Strict
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.key_docs import group_keys, read_field_docs
from ebbflow.recipe.promotion import GuardrailToleranceConfig
from ebbflow.recipe.stages import OnlineStageConfig
from tests.nested import paths, replaced


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
