"""``ebbflow evaluate``: two policies on the same held-out prompts, by the rules of the gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ebbflow.cli import main
from ebbflow.comparison import policies
from ebbflow.models import load_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import ModelConfig
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import PolicyMetadata
from tests.parameters import move
from tests.report.page_structure import problems

HELD_OUT = 24


@pytest.fixture
def recipe_file(store: Path, tmp_path: Path) -> Path:
    settings = {
        "name": "small",
        "output": str(store),
        "prompts": {"count": 100, "validation": 4, "held_out": HELD_OUT},
        "rewards": ["similarity"],
        "guardrails": ["jpeg_compressibility"],
        "evaluation": {"steps": 2, "samples": 1, "repeated_prompts": 1, "resamples": 200},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def make_policy(base_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """``make_policy("a", 0.01)``: the folder of a policy whose weights have moved."""

    def make(name: str, distance: float, **model: Any) -> Path:
        config = Recipe().policy
        policy = Policy(load_model(base_folder), config, 0)
        move(policy, distance)
        metadata = PolicyMetadata(
            base_digest=verify_folder(base_folder),
            recipe_digest="0" * 64,
            config=config,
            model=ModelConfig(**model),
            version=5,
            steps=2,
        )
        policy.save_folder(tmp_path / name, metadata)
        return tmp_path / name

    return make


@pytest.fixture
def evaluate(recipe_file: Path, base_folder: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(policy: str | Path, against: str | Path = "base") -> Result:
        options = ["--recipe", recipe_file, "--base", base_folder, "--output", tmp_path / "out"]
        words = ["evaluate", policy, "--against", against, *options]
        return CliRunner().invoke(main, list(map(str, words)))

    return run


def test_a_policy_is_compared_with_its_base_model(
    evaluate: Callable[..., Result],
    make_policy: Callable[..., Path],
    recipe_file: Path,
    tmp_path: Path,
) -> None:
    policy = make_policy("policy", 0.02)
    result = evaluate(policy)
    assert result.exit_code == 0, result.output
    [pair] = [file.parent for file in (tmp_path / "out").rglob("evaluation.html")]
    numbers = json.loads((pair / "evaluation.json").read_text())
    target = numbers["decision"]["target"]
    assert target["prompts"] == HELD_OUT
    assert target["difference"] == pytest.approx(
        numbers["policy"]["reward"] - numbers["against"]["reward"]
    )
    assert target["difference"] != 0
    assert numbers["policy_digest"] == verify_folder(policy)
    assert [one["metric"] for one in numbers["decision"]["guardrails"]] == ["jpeg_compressibility"]
    assert "against the base model" in result.stdout
    assert str(pair / "evaluation.html") in result.stdout
    page = (pair / "evaluation.html").read_text()
    assert problems(page) == []
    # Both sides of the first 16 prompts, and nothing in the registry.
    assert page.count('id="picture-') == 2 * 16
    store = connect_to_store(resolve_tracking_uri(Recipe(output=str(tmp_path / "none"))))
    assert not [one for one in store.search_registered_models() if one.name == "ebbflow-small"]


def test_a_reward_model_is_looked_up_in_the_store_of_the_recipe(
    evaluate: Callable[..., Result], recipe_file: Path, tmp_path: Path
) -> None:
    settings = yaml.safe_load(recipe_file.read_text())
    settings["rewards"] = [{"name": "model", "uri": "models:/nobody@champion"}]
    settings["output"] = str(tmp_path / "runs")
    recipe_file.write_text(yaml.safe_dump(settings))
    result = evaluate("base", tmp_path / "none")
    assert result.exit_code == 1
    assert "rewards: " in result.output
    assert str(tmp_path / "runs") in result.output


def test_a_policy_against_itself_differs_by_nothing(
    evaluate: Callable[..., Result], make_policy: Callable[..., Path], tmp_path: Path
) -> None:
    policy = make_policy("policy", 0.02)
    result = evaluate(policy, policy)
    assert result.exit_code == 0, result.output
    [file] = (tmp_path / "out").rglob("evaluation.json")
    decision = json.loads(file.read_text())["decision"]
    assert decision["target"]["difference"] == 0
    assert not decision["promote"]
    assert "NOT PROVEN BETTER" in result.stdout


def test_samples_of_an_earlier_command_are_used_again(
    evaluate: Callable[..., Result],
    make_policy: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = make_policy("first", 0.02)
    second = make_policy("second", 0.03)
    assert evaluate(first).exit_code == 0
    evaluated = []
    evaluate_folder = policies.evaluate_folder

    def record(recipe: Recipe, base: Path, folder: Path, *arguments: Any) -> Any:
        evaluated.append(folder)
        return evaluate_folder(recipe, base, folder, *arguments)

    monkeypatch.setattr(policies, "evaluate_folder", record)
    assert evaluate(first, second).exit_code == 0
    assert evaluated == [second]
    # Another policy in the same folder is another policy.
    assert (
        evaluate(make_policy("moved", 0.04).rename(first.with_name("other")), "base").exit_code == 0
    )
    assert len(evaluated) == 2


def test_what_cannot_be_compared_is_refused(
    evaluate: Callable[..., Result], make_policy: Callable[..., Path]
) -> None:
    both = evaluate("base", "base")
    assert both.exit_code == 1
    assert "both policies are the base model" in both.output
    nothing = evaluate("no-such-model", make_policy("policy", 0.02))
    assert nothing.exit_code == 1
    assert "no version of 'no-such-model' has the alias 'champion'" in nothing.output
