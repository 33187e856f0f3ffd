"""Evaluations with a sampler and a size of their own: train small, evaluate large, and serve what
was evaluated.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from benchmarks.tiny_models import build_tiny
from ebbflow.data.images import decode_pngs
from ebbflow.data.prompts import read_prompts, write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.evaluation.evaluate import (
    EvaluationError,
    build_evaluation_keys,
    evaluate_folder,
    require_same_image_size,
)
from ebbflow.evaluation.serve import generate_images
from ebbflow.models import load_model
from ebbflow.online.monitor import build_validation_requests
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.model import resize_model
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.tables import read_table
from ebbflow.training.policy_metadata import (
    PolicyError,
    read_policy_metadata,
    require_allowed_code,
    write_base_policy,
)
from tests.glyph_stages import small_stage

ONLINE = {"kind": "online", "steps": 1, "prompts_per_step": 2, "group_size": 2, "micro_batch": 4}
LARGE = {"steps": 3, "samples": 1, "sampler": "dpm_solver", "height": 96, "width": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sd3"
    with write_new_folder(folder) as unfinished:
        build_tiny("sd3", unfinished)
    return folder


@pytest.fixture
def table(make_prompts, tmp_path) -> Path:
    splits = [("train", make_prompts(4)), ("held_out", make_prompts(7)[4:])]
    rows = [vars(prompt) | {"split": split} for split, prompts in splits for prompt in prompts]
    write_prompts(pa.Table.from_pylist(rows, PROMPTS), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def recipe_of(base: Path, evaluation: dict, height: int = 64, **rest) -> Recipe:
    model = {"family": "sd3", "path": str(base), "height": height, "width": 64, "max_tokens": 8}
    stages = [small_stage(ONLINE | {"sampler": {"steps": 3}, "window": {"size": 1}})]
    rewards = {"rewards": ["jpeg_compressibility"], "guardrails": []}
    return Recipe.model_validate(
        {"model": model, "stages": stages, "evaluation": evaluation, **rewards, **rest}
    )


def test_a_policy_trains_small_and_is_evaluated_and_served_large(base, table, tmp_path):
    recipe = recipe_of(base, LARGE, policy={"train": "lora", "rank": 2, "alpha": 2})
    start = tmp_path / "start"
    trained = tmp_path / "trained"
    samples = tmp_path / "samples.parquet"
    write_base_policy(
        start, verify_folder(base), recipe.digest, recipe.policy, recipe.model, recipe.evaluation
    )
    folders = StageFolders(base, start, table, trained)
    train_online_folder(StageContext(recipe, 0, 0), folders, MetricsRecorder())
    evaluation = evaluate_folder(recipe, base, trained, table, "after", samples)
    images = decode_pngs(read_table(samples)["image"].to_pylist())
    assert images.shape == (3, 96, 64, 3)
    assert evaluation.velocity_drift > 0

    prompts = read_prompts(table, "held_out")
    (drawn,) = generate_images(base, trained, prompts[:1], [0])
    assert drawn.image
    assert Image.open(io.BytesIO(drawn.image)).size == (64, 96)


def test_an_evaluation_draws_with_its_sampler(base, table, tmp_path):
    recipe = recipe_of(base, LARGE)
    write_base_policy(
        tmp_path / "start",
        verify_folder(base),
        "recipe",
        recipe.policy,
        recipe.model,
        recipe.evaluation,
    )
    evaluate_folder(recipe, base, tmp_path / "start", table, "before", tmp_path / "samples.parquet")
    stored = decode_pngs(read_table(tmp_path / "samples.parquet")["image"].to_pylist()).astype(int)
    model = load_model(base, resize_model(recipe.model, 96, None))
    prompts = read_prompts(table)[4:]

    def distance(name: str) -> float:
        sampler = SamplerConfig(name=name, steps=3)
        latents = generate_samples(
            model, model.encode_prompts(prompts), build_evaluation_keys(prompts), sampler
        ).latents
        return float(np.abs(stored - model.decode_latents(latents)).mean())

    assert distance("dpm_solver") < distance("ode") / 4


def test_a_champion_is_evaluated_as_this_recipe_says(base, table, tmp_path):
    """Whatever size it was trained in: it is served in the one that both are evaluated in."""
    recipe = recipe_of(base, LARGE)
    folder = tmp_path / "champion"
    write_base_policy(
        folder, verify_folder(base), "other", PolicyConfig(), recipe_of(base, {}, height=96).model
    )
    require_same_image_size(recipe, folder)
    evaluate_folder(recipe, base, folder, table, "champion", tmp_path / "samples.parquet")
    assert decode_pngs(read_table(tmp_path / "samples.parquet")["image"].to_pylist()).shape[
        1:3
    ] == (
        96,
        64,
    )

    small = tmp_path / "small"
    write_base_policy(small, verify_folder(base), "other", PolicyConfig(), recipe.model)
    with pytest.raises(
        EvaluationError, match="generates 1 frame.* 64 x 64 .* this recipe 1 frame.* 96 x 64 "
    ):
        require_same_image_size(recipe, small)
    large = tmp_path / "large"
    write_base_policy(
        large, verify_folder(base), "other", PolicyConfig(), recipe.model, recipe.evaluation
    )
    require_same_image_size(recipe_of(base, {}, height=96), large)


def test_a_validation_has_the_sampler_of_an_evaluation(base, make_prompts):
    ctx = StageContext(recipe_of(base, LARGE), 0, 0)
    prompts = make_prompts(2)
    (request,) = build_validation_requests(ctx, prompts, lambda batch: None, version=0)
    assert request.sampler == SamplerConfig(name="dpm_solver", steps=3)


def test_keys_at_their_defaults_leave_the_digest_as_it_was():
    plain = Recipe()
    assert (
        Recipe.model_validate({"evaluation": {"sampler": "ode", "eta": None}}).digest
        == plain.digest
    )
    other = Recipe.model_validate({"evaluation": {"sampler": "unipc"}})
    assert other.digest != plain.digest
    assert Recipe.model_validate(other.model_dump()).digest == other.digest


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"sampler": "dpm_sover"}, "did you mean 'dpm_solver'"),
        ({"eta": 0.5}, "evaluation: ode is deterministic and has no eta"),
        ({"sampler": "cps", "eta": 1.5}, "take 1 or less"),
        (
            {"width": 64},
            "evaluation.width = 64: the glyph model draws the size that it was trained on",
        ),
    ],
)
def test_what_an_evaluation_cannot_have(evaluation, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.model_validate({"evaluation": evaluation})


def test_a_policy_whose_sampler_is_foreign_code_is_not_served_unasked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    evaluation = EvaluationConfig(sampler="mine.fading:FADING")
    write_base_policy(tmp_path / "policy", "base", "recipe", PolicyConfig(), evaluation=evaluation)
    metadata = read_policy_metadata(tmp_path / "policy")
    with pytest.raises(PolicyError, match="mine.fading:FADING"):
        require_allowed_code(metadata, tmp_path / "policy")
    own = Recipe.model_validate({"evaluation": {"sampler": "mine.fading:FADING"}}).plugin_paths
    require_allowed_code(metadata, tmp_path / "policy", own)
