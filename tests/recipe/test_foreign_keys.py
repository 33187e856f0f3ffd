"""Keys that a user knows from other libraries."""

from __future__ import annotations

from typing import Any

import pytest

from ebbflow.commands.recipes import _iterate_keys
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.foreign_keys import FOREIGN_KEYS


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"stages": [{"kind": "online", "num_generations": 8}]},
            "stages.0.online.num_generations: unknown key; Ebbflow calls it 'group_size'. Known",
        ),
        (
            {"stages": [{"kind": "online", "beta": 0.04}]},
            "stages.0.online.beta: unknown key; Ebbflow calls it 'reference.weight'. Known",
        ),
        ({"output_dir": "x"}, "output_dir: unknown key; Ebbflow calls it 'output'. Known"),
    ],
)
def test_a_key_of_another_library_is_answered_with_our_own(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(settings)
    assert says in str(error.value)


def test_a_key_that_an_algorithm_has_is_no_foreign_one() -> None:
    algorithm = {"name": "diffusion_nft", "beta": 0.5}
    Recipe.model_validate({"stages": [{"kind": "online", "algorithm": algorithm}]})


def test_every_answer_is_a_key() -> None:
    keys = {line[0] for line in _iterate_keys(Recipe, "", {}) if not isinstance(line, str)}
    plain = {key.replace("[]", "").replace("(OnlineStage)", "") for key in keys}
    # An algorithm stands in brackets behind its key.
    plain |= {key.replace("(FlowGRPO)", "") for key in plain}
    known = plain | {key.removeprefix("stages.") for key in plain}
    assert sorted(set(FOREIGN_KEYS.values()) - known) == []


@pytest.mark.parametrize("revision", ["main", "v1.0", "3de623f", "3DE623FC" * 5])
def test_a_branch_as_a_revision_is_answered_in_words(revision: str) -> None:
    model = {"family": "sd3", "path": "owner/sd3", "revision": revision}
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate({"model": model})
    text = str(error.value)
    assert f"model.revision = {revision!r}: this is no commit, and a branch or a tag" in text
    assert "[0-9a-f]" not in text
