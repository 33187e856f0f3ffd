"""Evaluations of a policy folder: of which family it is, and in which size it generates."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ebbflow.data.images import decode_pngs
from ebbflow.data.schema import PROMPTS
from ebbflow.evaluation.evaluate import (
    EvaluationError,
    build_evaluation_keys,
    evaluate_folder,
    require_same_image_size,
)
from ebbflow.models import load_model
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rewards.base import Reward
from ebbflow.rollouts.generate import generate_samples
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table, write_table
from ebbflow.training.policy_metadata import write_base_policy

SHIFTED = "mine.shifted:ShiftedGlyph"


class Compared(Reward):
    """A reward of whole groups, which an evaluation has none of."""

    scores = "groups"

    def __call__(self, images, prompts):
        raise AssertionError("there is nothing to compare")


@pytest.mark.parametrize("family", ["glyph", SHIFTED])
def test_a_policy_is_evaluated_with_the_family_of_its_card(
    family, make_recipe, prompts, base_folder, tmp_path, monkeypatch
):
    """Whose schedule it is shows in the images."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    its_model = ModelConfig(family=family, path="base")
    write_base_policy(
        tmp_path / "policy", verify_folder(base_folder), "recipe", PolicyConfig(), its_model
    )
    write_table(
        tmp_path / "prompts.parquet",
        PROMPTS,
        [pa.RecordBatch.from_pylist([asdict(p) for p in prompts], PROMPTS)],
        {},
    )
    recipe = make_recipe(
        model=its_model.model_dump(),
        rewards=["jpeg_compressibility", f"{__name__}:Compared"],
        guardrails=[],
    )
    evaluate_folder(
        recipe,
        base_folder,
        tmp_path / "policy",
        tmp_path / "prompts.parquet",
        "champion",
        tmp_path / "samples.parquet",
    )
    table = read_table(tmp_path / "samples.parquet")
    assert table["reward"].equals(table["jpeg_compressibility"])
    assert "Compared" not in table.column_names
    stored = decode_pngs(table["image"].to_pylist()).astype(int)

    def distance(of):
        model = load_model(base_folder, ModelConfig(family=of, path="base"))
        sampler = SamplerConfig(name="ode", steps=recipe.evaluation.steps)
        latents = generate_samples(
            model, model.encode_prompts(prompts), build_evaluation_keys(prompts), sampler
        ).latents
        return np.abs(stored - model.decode_latents(latents)).max()

    (other,) = {"glyph", SHIFTED} - {family}
    assert distance(family) <= 1
    assert distance(other) > 1


def test_a_champion_of_another_size_is_refused(make_recipe, tmp_path):
    def champion(**size):
        model = ModelConfig(family="sd3", path="base", **size)
        write_base_policy(tmp_path / "policy", "base", "recipe", PolicyConfig(), model)
        return tmp_path / "policy"

    recipe = make_recipe(model={"family": "sd3", "path": "base", "height": 512, "width": 512})
    require_same_image_size(recipe, champion(height=512, width=512, guidance=4.5))
    for size in ({"height": 1024, "width": 512}, {"height": 512, "width": 512, "frames": 5}, {}):
        with pytest.raises(
            EvaluationError,
            match="generates .*, this recipe 1 frame.* 512 x 512 .*rename promotion.model_name",
        ):
            require_same_image_size(recipe, champion(**size))
