"""A user's own family: what the record in its file tells a recipe, read without importing it."""

from __future__ import annotations

import sys

import pytest

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.families import FAMILIES, Family, find_family

RECORD = 'FAMILY = Family(adapter="Letters", guided=False, trains_base_model=True, {further})'
OWN = "own_package.letters:Letters"


@pytest.fixture
def write_family(tmp_path, monkeypatch):
    """Writes the file of a family whose import, and that of its package, is an error."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")

    def write(record):
        (package / "letters.py").write_text(f"raise AssertionError('imported')\n{record}\n")

    return write


def problem(**keys):
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(keys)
    return str(error.value)


def test_the_record_of_a_users_family_is_read_without_importing_it(write_family):
    write_family(RECORD.format(further="has_fixed_size=True"))
    assert find_family(OWN) == Family(
        adapter="Letters", guided=False, trains_base_model=True, has_fixed_size=True
    )
    assert Recipe.model_validate({"model": {"family": OWN}}).model.path is None
    assert "own_package" not in sys.modules


def test_a_users_family_of_a_fixed_size_refuses_other_sizes_as_glyph_does(write_family):
    write_family(RECORD.format(further="has_fixed_size=True, unsupported_keys=('guidance',)"))
    assert (
        f"width, guidance: the {OWN} model draws what it was trained on; set training.height and"
        " width" in problem(model={"family": OWN, "width": 64, "guidance": 2.0})
    )
    assert f"evaluation.width = 64: the {OWN} model draws the size" in problem(
        model={"family": OWN}, evaluation={"width": 64}
    )
    stage = {
        "kind": "online",
        "algorithm": {"name": "mix_grpo"},
        "sizes": [{"height": 64, "width": 64}],
    }
    assert f"stages.0.sizes: the {OWN} model draws the size" in problem(
        model={"family": OWN}, stages=[stage]
    )


@pytest.mark.parametrize(
    "record", ["", "FAMILY = 'letters'", 'FAMILY = Family(adapter="Another", trains_base_model=1)']
)
def test_a_users_family_without_a_record_of_its_own_needs_a_path(record, write_family):
    write_family(record)
    assert find_family(OWN) is None
    assert (
        f"family = {OWN!r} needs the 'path' of its base model; only glyph is trained here"
        in problem(model={"family": OWN})
    )
    Recipe.model_validate({"model": {"family": OWN, "path": "base", "width": 64}})


@pytest.mark.parametrize("family", ["no_package:Model", "pathlib.no_module:Model", "sys:Model"])
def test_a_family_that_is_not_installed_here_has_no_record(family):
    assert find_family(family) is None


@pytest.mark.parametrize(
    "further", ["guides=True", "vllm_omni=name_of_network"], ids=["unknown", "no literal"]
)
def test_a_record_that_cannot_be_read_is_explained(further, write_family):
    write_family(RECORD.format(further=further))
    text = problem(model={"family": OWN})
    assert "letters.py: FAMILY = Family(...) cannot be read" in text
    assert "ebbflow.recipe.families.Family, as literals" in text


def test_glyph_alone_is_trained_and_has_a_fixed_size():
    assert [name for name, family in FAMILIES.items() if family.trains_base_model] == ["glyph"]
    assert [name for name, family in FAMILIES.items() if family.has_fixed_size] == ["glyph"]
