"""Registered versions with evidence, from made-up scores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verification_cases import (
    Version,
    VersionCopy,
    committed,
    evaluated,
    prompt_table,
    registered,
)

from ebbflow.data.prompts import Prompt
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import verify_folder
from ebbflow.training.policy_metadata import PolicyMetadata
from tests.store_fixtures import *  # noqa: F403


@pytest.fixture(scope="session")
def gated_recipe(store: Path) -> Recipe:
    """With a reward and a guardrail that the made-up scores are of."""
    settings = {
        "output": str(store),
        "rewards": [{"name": "similarity", "weight": 2}],
        "guardrails": ["ocr"],
    }
    return Recipe.model_validate(settings | {"evaluation": {"steps": 2, "resamples": 200}})


@pytest.fixture(scope="session")
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    shown = [*make_prompts(3), *make_prompts(3, "validation"), *make_prompts(24, "held_out")]
    return [Prompt(**vars(prompt) | {"prompt_id": index}) for index, prompt in enumerate(shown)]


@pytest.fixture
def make_version(
    gated_recipe: Recipe, name: str, prompts: list[Prompt], tmp_path: Path, few_sources: None
) -> Callable[..., Version]:
    """``make_version(gain=0.2, promoted=True)``: registered with evidence, and promoted where the
    gate lets it through.

    ``repeated``: how many prompts have several samples. ``shown``: the prompts of the run.
    """

    def make(
        gain: float = 0.2,
        promoted: bool = True,
        repeated: int = 0,
        recipe: Recipe = gated_recipe,
        shown: list[Prompt] = prompts,
    ) -> Version:
        folder = tmp_path / uuid.uuid4().hex
        return register_made_up(recipe, name, folder, shown, gain, promoted, repeated)

    return make


def register_made_up(
    recipe: Recipe,
    name: str,
    folder: Path,
    shown: list[Prompt],
    gain: float = 0.2,
    promoted: bool = True,
    repeated: int = 0,
) -> Version:
    """Register a policy that nobody loads, with scores that nobody measured."""
    base = committed(folder / "base", {"model_index.json": "{}", "weights.safetensors": "w" * 64})
    metadata = PolicyMetadata(
        base_digest=verify_folder(base),
        recipe_digest=recipe.digest,
        config=recipe.policy,
        version=7,
    )
    policy = committed(
        folder / "policy",
        {"policy.json": metadata.model_dump_json(), "weights.safetensors": "p" * 64},
    )
    sides = {
        "candidate": evaluated(folder / "candidate.parquet", shown, gain, "1.1 online", repeated),
        "champion": evaluated(folder / "champion.parquet", shown, 0.0, "before", repeated),
    }
    return registered(
        recipe,
        name,
        base,
        policy,
        sides,
        prompt_table(folder / "prompts.parquet", shown),
        promoted,
    )


@pytest.fixture(scope="module")
def version_copy(
    gated_recipe: Recipe,
    prompts: list[Prompt],
    tmp_path_factory: pytest.TempPathFactory,
    few_sources: None,
) -> VersionCopy:
    """Of one promoted version: registering takes longer than what most tests do with it."""
    folder = tmp_path_factory.mktemp("version")
    model = f"model-{uuid.uuid4().hex[:8]}"
    version = register_made_up(gated_recipe, model, folder / "inputs", prompts)
    return VersionCopy(version, folder / "copy")


@pytest.fixture
def version(version_copy: VersionCopy) -> Iterator[Version]:
    """A promoted version that a test may change: its files and the whole store are put back."""
    yield version_copy.version
    version_copy.restore()
