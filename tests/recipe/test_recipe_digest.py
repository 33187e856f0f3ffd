"""The digest of a recipe: it is of what the recipe means, however it was written down, and new keys
at their defaults leave it as it was.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from recipe_cases import SHIPPED, WRITTEN

from ebbflow.recipe import Recipe, load_recipe
from ebbflow.recipe.base import Strict
from ebbflow.recipe.digest import compute_digest, select_set_keys


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
