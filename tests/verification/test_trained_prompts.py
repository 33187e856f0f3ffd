"""A champion that was trained on prompts which a run holds out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from verification_cases import Version

from ebbflow.cli import main
from ebbflow.data.prompts import Prompt
from ebbflow.recipe import Recipe
from ebbflow.registry.trained_prompts import TRAINING_STORED, describe_trained_prompts


def test_prompts_that_the_champion_was_trained_on_are_counted(
    version: Version, prompts: list[Prompt]
) -> None:
    trained = [prompt for prompt in prompts if prompt.split == "train"]
    held_out = [prompt for prompt in prompts if prompt.split == "held_out"][5:]
    assert describe_trained_prompts(version.uri, version.name, held_out) is None
    # In another spelling, too.
    twin = replace(trained[1], prompt=trained[1].prompt.lower() + ".", split="held_out")
    said = describe_trained_prompts(version.uri, version.name, [*held_out, twin])
    assert said is not None
    assert f"version 1, was trained on 1 of the {len(held_out) + 1} held-out prompts" in said
    version.client.delete_model_version_tag(version.name, "1", TRAINING_STORED)
    assert describe_trained_prompts(version.uri, version.name, [twin]) is None, "it does not say"
    assert describe_trained_prompts(version.uri, "another-model", [twin]) is None


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_check_says_what_the_champion_was_trained_on(
    version: Version, recipe: Recipe, prompts: list[Prompt], tmp_path: Path, is_trained: bool
) -> None:
    file = tmp_path / "benchmark.txt"
    lines = [f'"Q{first}{second}Z"' for first in "ABCD" for second in "EFGHIJ"]
    if is_trained:
        lines[3] = next(prompt.prompt for prompt in prompts if prompt.split == "train")
    file.write_text("".join(f"{line}\n" for line in lines))
    settings = {
        "output": recipe.output,
        "prompts": {"held_out_source": str(file), "held_out": len(lines), "validation": 4},
        "guardrails": [],
        "promotion": {"model_name": version.name},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 0, done.output
    assert ("was trained on 1 of the 24 held-out prompts" in done.output) is is_trained
    # A power of 24 prompts with four samples each.
    assert "the gate decides on 24 held-out prompts with 4 samples each" in done.output


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tiny", "the gate decides on 12 held-out prompts, which are too few: it promotes nothing"),
        ("glyph", "the gate decides on 128 held-out prompts with 4 samples each"),
    ],
)
def test_a_check_says_whether_a_recipe_that_comes_along_can_be_promoted(
    name: str, line: str
) -> None:
    done = CliRunner().invoke(main, ["check", str(ROOT / "workflows" / "recipes" / f"{name}.yaml")])
    assert done.exit_code == 0, done.output
    assert line in done.output
