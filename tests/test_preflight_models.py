"""What a preflight check says about the base model, the sizes that it draws and its start."""

from pathlib import Path

import pytest

from benchmarks.tiny_models import build_tiny
from ebbflow.models import ModelError
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError
from tests.preflight_cases import SERVER


def with_model(tmp_path: Path, **model: object) -> Recipe:
    return Recipe.model_validate({"output": str(tmp_path), "model": model})


def test_a_base_model_of_another_family_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    with pytest.raises(
        ModelError,
        match=r"base is not a sd3 base model: model_index.json missing.* as model.revision",
    ):
        check_recipe(with_model(tmp_path, family="sd3", path=str(folder)), SERVER, on_cluster=False)
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(
        ModelError, match="is a FluxPipeline, and model.family = 'sd3' .* set model.family to flux"
    ):
        check_recipe(with_model(tmp_path, family="sd3", path=str(folder)), SERVER, on_cluster=False)
    check_recipe(with_model(tmp_path, family="flux", path=str(folder)), SERVER, on_cluster=False)


def test_a_cluster_needs_a_base_model_that_every_pod_can_fetch(tmp_path: Path) -> None:
    shared = {"output": "s3://bucket/runs"}
    local = with_model(tmp_path, family="sd3", path="models/sd3").model_copy(update=shared)
    with pytest.raises(RecipeError, match="model.path = 'models/sd3' is a local path"):
        check_recipe(local, SERVER, on_cluster=True)
    pinned = with_model(tmp_path, family="sd3", path="owner/sd3", revision="0" * 40).model_copy(
        update=shared
    )
    check_recipe(pinned, SERVER, on_cluster=True)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ({"frames": 8}, "model.frames = 8: wan draws 1 . a multiple of 4 frames; take 9"),
        (
            {"height": 100, "width": 96},
            "model.height = 100: wan draws multiples of 32 pixels; take 96",
        ),
    ],
)
def test_a_size_that_the_base_model_cannot_draw(
    tmp_path: Path, size: dict[str, int], says: str
) -> None:
    build_tiny("wan", tmp_path / "wan")
    model = {"family": "wan", "path": str(tmp_path / "wan"), "height": 64, "width": 96}
    check_recipe(with_model(tmp_path, **model, frames=5), SERVER, on_cluster=False)
    with pytest.raises(ModelError, match=says):
        check_recipe(with_model(tmp_path, **model | size), SERVER, on_cluster=False)


def test_the_size_of_a_published_model_is_checked_without_it(tmp_path: Path) -> None:
    model = {
        "family": "wan",
        "path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "revision": "0" * 40,
        "frames": 10,
    }
    with pytest.raises(ModelError, match=r"model.frames = 10: .* take 9"):
        check_recipe(with_model(tmp_path, **model), SERVER, on_cluster=False)


def test_an_algorithm_on_the_gradient_of_the_reward_needs_a_family_that_decodes_with_gradient(
    tmp_path: Path,
) -> None:
    model = {"family": "tests.preflight_cases:OLDER_FAMILY", "path": "s3://bucket/base"}
    recipe = {"output": str(tmp_path), "rewards": ["recognizer"], "guardrails": [], "model": model}
    with pytest.raises(
        ModelError,
        match=r"draft learns .* rewards, and OlderFamily has no decode_with_gradient\(latents\)",
    ):
        check_recipe(
            Recipe.model_validate(recipe | {"stages": [on_gradient("draft")]}),
            SERVER,
            on_cluster=False,
        )
    check_recipe(
        Recipe.model_validate(recipe | {"stages": [on_gradient("mix_grpo")]}),
        SERVER,
        on_cluster=False,
    )


def test_no_gradient_for_negative_prompts_needs_a_family_that_says_so(tmp_path: Path) -> None:
    model = {
        "family": "tests.preflight_cases:OLDER_FAMILY",
        "path": "s3://bucket/base",
        "guidance": 2,
    }
    recipe = {"output": str(tmp_path), "model": model}
    stages = [{"kind": "online", "negative_gradient": False}]
    with pytest.raises(ModelError, match=r"OlderFamily has no splits_guidance = True"):
        check_recipe(Recipe.model_validate(recipe | {"stages": stages}), SERVER, on_cluster=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"stages": [{"kind": "online", "sizes": [{"height": 64, "width": 64}]}]},
        {"evaluation": {"height": 64}},
    ],
)
def test_several_sizes_need_a_family_that_generates_in_them(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    recipe = {
        "output": str(tmp_path),
        "model": {"family": "tests.preflight_cases:OLDER_FAMILY", "path": "s3://bucket/base"},
    }
    with pytest.raises(
        ModelError, match=r"OlderFamily has no set_image_size\(height, width\); write one"
    ):
        check_recipe(Recipe.model_validate(recipe | settings), SERVER, on_cluster=False)


def on_gradient(algorithm: str) -> dict[str, object]:
    return {"kind": "online", "algorithm": {"name": algorithm}}


def test_the_sizes_of_a_stage_must_be_drawable(tmp_path: Path) -> None:
    build_tiny("sd3", tmp_path / "sd3")
    stages = [
        {"kind": "online", "sizes": [{"height": 64, "width": 64}, {"height": 40, "width": 64}]}
    ]
    model = {"family": "sd3", "path": str(tmp_path / "sd3"), "height": 64, "width": 64}
    recipe = Recipe.model_validate({"output": str(tmp_path), "model": model, "stages": stages})
    with pytest.raises(
        ModelError,
        match=r"stages\.0\.sizes\.1\.height = 40: sd3 draws multiples of 16 pixels; take 32",
    ):
        check_recipe(recipe, SERVER, on_cluster=False)


def test_the_size_of_an_evaluation_must_be_drawable(tmp_path: Path) -> None:
    build_tiny("sd3", tmp_path / "sd3")
    model = {"family": "sd3", "path": str(tmp_path / "sd3"), "height": 64, "width": 64}
    recipe = Recipe.model_validate(
        {"output": str(tmp_path), "model": model, "evaluation": {"height": 96, "width": 68}}
    )
    with pytest.raises(
        ModelError, match=r"evaluation\.width = 68: sd3 draws multiples of 16 pixels; take 64"
    ):
        check_recipe(recipe, SERVER, on_cluster=False)
