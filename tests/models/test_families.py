"""The records of the families, against what they name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.tiny_models import TINY
from ebbflow.models import ModelError
from ebbflow.models.families import load_adapter
from ebbflow.models.pipeline import PipelineModel
from ebbflow.models.sizes import check_size
from ebbflow.recipe import RecipeError
from ebbflow.recipe.algorithms import import_object
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig

pytestmark = pytest.mark.any_cpu

ENGINE = Path(__file__).parents[2] / "containers" / "vllm_omni"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_names_an_adapter_that_agrees_with_it(family):
    record = FAMILIES[family]
    adapter = load_adapter(family)
    assert adapter.guided == record.guided
    assert adapter.pipeline_class.__name__ == record.pipeline
    assert ("vae" in adapter.text_parts) == record.edits_images
    if record.edits_images:
        assert adapter.min_images == record.min_images
        assert adapter.max_images == record.max_images
    assert issubclass(adapter, PipelineModel) == (family != "glyph")


@pytest.mark.parametrize("family", FAMILIES)
def test_published_models_generate_the_sizes_of_the_record(family):
    """A check of a recipe believes the record, and imports no torch."""
    record = FAMILIES[family]
    # Odd multiples: a model whose sides are multiples of twice as much refuses them.
    size = {"height": 9 * record.size_multiple, "width": 11 * record.size_multiple}
    frames = 1 + 3 * record.frame_multiple
    sides = tuple(size.values())
    if not record.size_multiple:
        assert not record.surely_generates((64, 64), 1)
        return
    assert record.surely_generates(sides, frames)
    assert not record.surely_generates((sides[0] + 1, sides[1]), frames)
    # One frame more, and a video of a family of images.
    assert not record.surely_generates(sides, frames + 1)
    for path in load_adapter(family).published:
        check_size(ModelConfig(family=family, path=path, revision="a" * 40, frames=frames, **size))


def test_every_family_but_glyph_has_a_tiny_model_and_each_of_them_a_builder():
    assert set(TINY) == set(FAMILIES) - {"glyph"} | {"wan21"}
    assert all(callable(import_object(path)) for path in TINY.values())


@pytest.mark.parametrize(
    "path", [record.vllm_omni for record in FAMILIES.values() if record.vllm_omni]
)
def test_the_engine_has_the_networks_that_the_records_name(path):
    """Read, for it can only be imported in the engine's own environment."""
    module, _, name = path.partition(":")
    source = ast.parse((ENGINE / f"{module.replace('.', '/')}.py").read_text())
    assert name in {
        target.id for node in source.body if isinstance(node, ast.Assign) for target in node.targets
    }


def test_a_class_that_is_no_adapter_is_refused():
    with pytest.raises(
        ModelError,
        match=r"model.family = 'pathlib:Path' has no 'load'; .*ebbflow.models.base.Model",
    ):
        load_adapter("pathlib:Path")
    with pytest.raises(RecipeError, match="cannot be imported"):
        load_adapter("nowhere:Model")
