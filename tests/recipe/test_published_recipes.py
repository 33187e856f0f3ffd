"""The shipped recipes: each says what was published, field by field, and can be run as it is."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest
import yaml
from published_cases import PUBLISHED, REWARDS

from ebbflow.data.prepare import prepare_prompt_table, select_branch_prompts
from ebbflow.data.prompt_files import QUOTED, read_prompt_file
from ebbflow.flow.windows import plan_steps
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.algorithms import EmaScheduleConfig
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.paths import resolve_local_path

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "workflows" / "recipes").glob("*.yaml"))
OWN = (
    "glyph",
    "glyph_few_steps",
    "glyph_flywheel",
    "glyph_lora",
    "glyph_ray",
    "glyph_specialists",
    "tiny",
)
SPECIALISTS = {
    "sd35_medium_specialists": "sd35_medium_ocr_512",
    "qwen_image_specialists": "qwen_image_ocr",
}
"""Recipes of several stages, and the one whose stage their specialists have."""
SIGNS = ROOT / "datasets" / "signs" / "prompts.txt"
SERVER = "https://mlflow.example"


def recipe_of(name: str) -> Recipe:
    return load_recipe(ROOT / "workflows" / "recipes" / f"{name}.yaml")


def test_every_recipe_is_one_of_ours_or_a_published_one():
    assert {path.stem for path in RECIPES} == {*OWN, *PUBLISHED, *SPECIALISTS} == {*OWN, *REWARDS}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_resolved_recipe_has_the_published_numbers(name):
    recipe = recipe_of(name)
    expected = PUBLISHED[name]
    (stage,) = recipe.stages
    assert stage.kind == "online"
    parts = {"model": recipe.model, "policy": recipe.policy, "stage": stage}
    for key, values in expected.items():
        if key == "steps":
            assert recipe.rounds * stage.steps == values
        elif key == "evaluation":
            assert recipe.evaluation.steps == values
        else:
            part = parts.get(key) or getattr(stage, key)
            assert {field: getattr(part, field) for field in values} == values, key


@pytest.mark.parametrize("name", SPECIALISTS)
def test_specialists_are_trained_as_published_and_merged(name):
    recipe = recipe_of(name)
    published = recipe_of(SPECIALISTS[name])
    assert [
        (stage.kind, stage.branch, stage.hyper_parameters.name) for stage in recipe.stages[:2]
    ] == [
        ("offline", None, "sft"),
        ("offline", None, "diffusion_dpo"),
    ]
    (own,), others = published.stages, {"branch", "steps"}
    specialists = [stage for stage in recipe.stages if stage.branch]
    assert [stage.branch for stage in specialists] == ["signs", "scenes"]
    assert all(
        stage.model_dump(exclude=others) == own.model_dump(exclude=others) for stage in specialists
    )
    assert (recipe.model, recipe.policy.rank, recipe.evaluation) == (
        published.model,
        published.policy.rank,
        published.evaluation,
    )
    assert recipe.branches["signs"].rewards == published.rewards
    assert recipe.stages[-1].hyper_parameters.teachers == {
        "signs": "branch:signs",
        "scenes": "branch:scenes",
    }
    for stage in recipe.stages[:2]:
        keys = [
            key for key, value in stage.hyper_parameters.published.items() if key != "group_size"
        ]
        assert stage.group_size == stage.hyper_parameters.published["group_size"].value
        assert all(
            value_at(stage, key) == stage.hyper_parameters.published[key].value
            for key in keys
            if not key.startswith("updates")
        )


def value_at(stage, key):
    """``optimizer.lr`` of a stage."""
    return reduce(getattr, key.split("."), stage)


def test_rewards_of_omninft_are_routed_and_weighted_as_published():
    recipe = recipe_of("ltx2_omninft")
    assert {reward.name: (reward.latents, reward.weight) for reward in recipe.rewards} == {
        "videoalign": (["video"], 1.0),
        "hpsv3": (["video"], 1.5),
        "clap": (["sound"], 1.0),
        "audio_video_sync": ([], 1.0),
    }


@pytest.mark.parametrize("name", SPECIALISTS)
def test_the_prompts_of_specialists_are_there_and_are_enough(name):
    recipe = recipe_of(name)
    table, _ = prepare_prompt_table(recipe, *map(resolve_local_path, recipe.prompts.source_files))
    assert table["split"].to_pylist().count("train") == 2 * 320 - 112 - 128
    for branch in recipe.branches:
        assert (
            select_branch_prompts(recipe, table, branch)["split"].to_pylist().count("held_out")
            >= MIN_PROMPTS
        )


def test_copies_follow_as_published():
    nft = recipe_of("sd35_medium_nft")
    old = nft.stages[0].hyper_parameters.old
    assert [old.decay_after_step(step) for step in (1, 100, 500, 2000)] == pytest.approx(
        [0.001, 0.1, 0.5, 0.5]
    )
    assert nft.policy.ema.decay_after_step(1000) == 0.9
    # What the header gives for OCR, by rollout steps of two gradient steps n: published code has
    # min(.0075 (n - 75), .999).
    header = (ROOT / "workflows" / "recipes" / "sd35_medium_nft.yaml").read_text()
    given = re.search(r"old: (\{warmup: 37[^}]*\})\.", header)
    ocr = EmaScheduleConfig.model_validate(yaml.safe_load(given[1]))
    for step in range(1, 200):
        published = min(0.0075 * max(2 * step - 75, 0), 0.999)
        assert ocr.decay_after_step(step) == pytest.approx(published, abs=0.0075 + 1e-9)
    for name in ("sd35_medium_ocr_512", "flux_dev", "z_image", "flux_kontext"):
        assert recipe_of(name).policy.ema.decay_after_step(1000) ** 8 == pytest.approx(
            0.9, abs=2e-3
        )  # .9 after every eighth update


@pytest.mark.parametrize(
    ("name", "trained", "starts"),
    [
        ("sd35_medium_ocr", 3, {0, 1, 2}),
        ("qwen_image_ocr", 2, {0, 1, 2, 3}),
        ("qwen_image_21", 2, {3}),
        ("ltx2_flow_grpo", 3, {0, 1, 2, 3, 4, 5, 6, 7}),
        ("qwen_image_edit", 3, {0, 1, 2, 3}),
        ("qwen_image_edit_2511", 3, {0, 1, 2, 3}),
        ("flux_kontext", 1, {1, 2, 3}),
        ("z_image", 1, {1, 2, 3}),
        ("flux2_dev", 1, {1, 2, 3}),
        ("flux2_edit", 1, {1, 2, 3}),
        ("wan22_5b", 2, {0, 1, 2, 3}),
        ("sd35_medium_ocr_512", 9, {0}),
        ("flux_dev", 5, {0}),
    ],
)
def test_windows_start_where_they_were_published_to(name, trained, starts):
    stage = recipe_of(name).stages[0]
    plans = [plan_steps(stage.window, stage.sampler.steps, step, seed=0) for step in range(200)]
    assert {len(chosen.trained) for chosen in plans} == {trained}
    assert {chosen.trained[0] for chosen in plans} == starts
    if len(starts) > 1:
        assert max(chosen.trained[-1] for chosen in plans) < stage.sampler.steps / 2


@pytest.mark.parametrize("name", REWARDS)
def test_what_is_fetched_is_pinned_and_guards_fetch_nothing(name):
    recipe = recipe_of(name)
    assert [reward.name for reward in recipe.rewards] == REWARDS[name]
    assert all(reward.layout == "page" for reward in recipe.rewards if reward.name == "ocr")
    assert all(
        reward.match == "contained" for reward in recipe.rewards if reward.name == "ocr"
    )  # as all published code
    assert all(
        guardrail.match == "exact" for guardrail in recipe.guardrails if guardrail.name == "ocr"
    )
    assert {guardrail.name for guardrail in recipe.guardrails} <= {"ocr", "jpeg_incompressibility"}
    assert re.fullmatch("[0-9a-f]{40}", recipe.model.revision)


def test_the_same_repository_has_the_same_commit_everywhere():
    commits: dict[str, set[str]] = {}
    for path in RECIPES:
        for repository, commit in re.findall(
            r"path: (\S+/\S+)\n +revision: (\w+)", path.read_text()
        ):
            commits.setdefault(repository, set()).add(commit)
    assert len(commits) == 24
    assert all(len(known) == 1 for known in commits.values())


@pytest.mark.parametrize("name", [*PUBLISHED, *SPECIALISTS])
def test_a_header_names_the_source_and_what_is_adapted(name):
    text = (ROOT / "workflows" / "recipes" / f"{name}.yaml").read_text()
    header = text[: text.index("\nname:")]
    assert all(line.startswith("# ") for line in header.splitlines())
    assert "\n# Source: " in header
    assert "\n# Adapted: " in header


@pytest.mark.parametrize("name", [*PUBLISHED, *SPECIALISTS])
def test_a_recipe_for_all_gpus_of_a_deployment_is_colocated(name):
    path = ROOT / "workflows" / "recipes" / f"{name}.yaml"
    text = " ".join(path.read_text().replace("\n#", "").split())
    says_all = "as many as the deployment has" in text or "all GPUs of the deployment" in text
    placements = {stage.placement for stage in load_recipe(path).stages if stage.kind == "online"}
    assert placements == {"colocated" if says_all else "in_process"}
    assert says_all == (name != "sd35_medium_ocr"), "the recipe for one GPU"


@pytest.mark.parametrize(
    "name",
    [name for name in PUBLISHED if not FAMILIES[PUBLISHED[name]["model"]["family"]].edits_images],
)
def test_the_prompts_are_there_and_are_enough(name):
    recipe = recipe_of(name)
    assert recipe.prompts.source in (
        "ebbflow:datasets/signs/prompts.txt",
        "ebbflow:datasets/scenes/prompts.txt",
    )
    table, _ = prepare_prompt_table(recipe, resolve_local_path(recipe.prompts.source))
    assert table["split"].to_pylist().count("train") == 320 - 32 - 64


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_pod_accepts_every_recipe(path, tmp_path, monkeypatch):
    """It has what is installed, another working directory, and no file of the one who started the
    run.
    """
    settings = load_recipe(path).model_dump(mode="json") | {"output": "s3://bucket/runs"}
    monkeypatch.chdir(tmp_path)
    if FAMILIES[settings["model"]["family"]].edits_images:
        with pytest.raises(
            RecipeError,
            match="'data/edits.jsonl' is a local path, which pods cannot see; .* give its URI",
        ):
            check_recipe(Recipe.model_validate(settings), SERVER, on_cluster=True)
        settings["prompts"]["source"] = "s3://bucket/edits.parquet"
    check_recipe(Recipe.model_validate(settings), SERVER, on_cluster=True)


def test_signs_are_scenes_with_texts_of_their_own():
    """As the card says: 16 scenes with 20 texts each, no text twice."""
    rows, report = read_prompt_file(SIGNS)
    assert (len(rows), report.duplicates) == (320, 0)
    scenes = [QUOTED.sub("", row.prompt) for row in rows]
    assert [scenes[index] for index in range(0, 320, 20)] == list(dict.fromkeys(scenes))
    assert all(scene == scenes[index - index % 20] for index, scene in enumerate(scenes))
    assert len({row.target.lower() for row in rows}) == 320
    assert all(re.fullmatch(r"[A-Z][A-Za-z]*( [A-Z][A-Za-z]*){0,2}", row.target) for row in rows)
    assert {len(row.target) for row in rows} == set(range(4, 17))


def test_scenes_are_subjects_in_settings():
    """As the card says: 20 subjects in 16 settings each, and nothing to read."""
    rows, report = read_prompt_file(SIGNS.parents[1] / "scenes" / "prompts.txt")
    assert (len(rows), report.duplicates) == (320, 0)
    assert {row.target for row in rows} == {None}


def test_the_pages_name_every_family_key_and_recipe():
    page, models = ((ROOT / name).read_text() for name in ("README.md", "docs/models.md"))
    for family in FAMILIES:
        assert f"\n| `{family}` |" in page
        assert f"\n| `{family}` |" in models
    for key in ModelConfig.model_fields.keys() - {"training"}:
        assert f"`{key}`" in models or f"`model.{key}`" in models, key
    assert all(f"`{path.stem}`" in page for path in RECIPES)
