"""What the champion had to pass binds the challenger: a recipe may ask for more, never for less."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import promotion_cases as cases
import pytest
import yaml
from click.testing import CliRunner, Result
from mlflow import MlflowClient

from ebbflow.cli import main
from ebbflow.data.records import Comparison
from ebbflow.evaluation.gate import REFUSED
from ebbflow.evaluation.pinned_policy import build_measured_policy, hold_to_gate_policy
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.gate_policy import GatePolicy, build_gate_policy, list_laxer_rules
from ebbflow.registry.gate_policy import (
    change_gate_policy,
    find_gate_policy,
    list_policy_changes,
    pin_gate_policy,
    read_gate_policy,
    require_gate_policy,
)
from ebbflow.registry.model_version import RegistryError
from ebbflow.registry.promotion import promote_version
from ebbflow.tracking.store import connect_to_store, resolve_tracking_uri

SETTINGS: dict[str, Any] = {
    "prompts": {"held_out": 64},
    "evaluation": {"confidence": 0.95},
    "guardrails": ["ocr", "similarity"],
    "rewards": ["jpeg_incompressibility"],
    "max_failed_share": 0.05,
    "promotion": {
        "guardrail_tolerance": {"default": 0.1, "absolute": {"similarity": 0.02}},
        "margins": {"entropy": 2.0},
    },
}


def build_recipe(store: Path, name: str = "a-model", **changes: Any) -> Recipe:
    """The recipe above; keys of ``changes`` are merged into its sections."""
    settings = {"output": str(store)} | SETTINGS
    for key, value in changes.items():
        merged = settings.get(key, {}) | value if isinstance(value, dict) else value
        settings[key] = merged
    settings["promotion"] = settings["promotion"] | {"model_name": name}
    return Recipe.model_validate(settings)


LAXER: dict[str, tuple[dict[str, Any], str]] = {
    "fewer prompts": ({"prompts": {"held_out": 63}}, "prompts.held_out = 63, below 64"),
    "other prompts": ({"prompts": {"held_out_source": "easy.txt"}}, "held-out prompts of 'easy"),
    "confidence": ({"evaluation": {"confidence": 0.9}}, "evaluation.confidence = 0.9, below 0.95"),
    "budget": (
        {"promotion": {"error_budget": 0.5, "looks_per_year": 520}},
        "promotion.error_budget = 0.5, above 0.05",
    ),
    "share of a look": (
        {"promotion": {"looks_per_year": 12}},
        "looks_per_year = 0.0042, above 0.00096",
    ),
    "no anchor": ({"promotion": {"anchor_tolerance": None}}, "anchor_tolerance = null, above 0.5"),
    "no guardrail": ({"guardrails": ["similarity"]}, "guardrail ocr is not measured"),
    "a tolerance": (
        {"promotion": {"guardrail_tolerance": {"default": 0.2, "absolute": {"similarity": 0.02}}}},
        "guardrail ocr may fall by 0.2 standard deviations, more than 0.1",
    ),
    "another unit": (
        {"promotion": {"guardrail_tolerance": {"default": 0.1}}},
        "the tolerance of guardrail similarity is not stated on its own scale",
    ),
    "a margin": ({"promotion": {"margins": {"entropy": 2.5}}}, "promotion.margins.entropy = 2.5"),
    "no margin": ({"promotion": {"margins": {"entropy": None}}}, "margins.entropy = null"),
    "other rewards": (
        {"rewards": ["jpeg_incompressibility", "ocr"], "guardrails": ["similarity", "tesseract"]},
        "rewards 1 jpeg_incompressibility + 1 ocr, not 1 jpeg_incompressibility",
    ),
    "failures": ({"max_failed_share": 0.1}, "max_failed_share = 0.1, above 0.05"),
}


@pytest.mark.parametrize(("changes", "message"), LAXER.values(), ids=LAXER)
def test_a_recipe_that_asks_for_less_is_refused_by_its_gate(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    pinned = build_gate_policy(build_recipe(tmp_path))
    laxer = build_recipe(tmp_path, **changes)
    guardrails = [
        Comparison(
            metric=config.column,
            champion=0.5,
            candidate=0.5,
            difference=0.0,
            low=0.0,
            high=0.0,
            prompts=64,
        )
        for config in laxer.guardrails
    ]
    decision = cases.WON.model_copy(update={"guardrails": guardrails})
    held = hold_to_gate_policy(laxer, decision, pinned)
    assert not held.promote
    assert held.policy == pinned
    assert held.reasons[-1].startswith(f"{REFUSED}The gate policy of a-model asks for more")
    assert message in held.reasons[-1]
    assert hold_to_gate_policy(laxer, decision, build_gate_policy(laxer)).promote


def test_a_recipe_that_asks_for_more_passes(tmp_path: Path) -> None:
    stricter = build_recipe(
        tmp_path,
        prompts={"held_out": 128},
        evaluation={"confidence": 0.99},
        guardrails=["ocr", "similarity", "tesseract"],
        max_failed_share=0.0,
        promotion={
            "approval": 72,
            "guardrail_tolerance": {"default": 0.05, "absolute": {"similarity": 0.01}},
            "margins": {"entropy": 1.0},
        },
    )
    pinned = build_gate_policy(build_recipe(tmp_path))
    assert list_laxer_rules(pinned, build_gate_policy(stricter)) == []
    assert "no promotion.approval, and a person must approve" in list_laxer_rules(
        build_gate_policy(stricter), pinned
    )


def test_a_pinned_guardrail_must_have_been_compared(tmp_path: Path) -> None:
    """Also where the recipe names it: it may not be installed in this run."""
    recipe = build_recipe(tmp_path)
    held = hold_to_gate_policy(recipe, cases.WON, build_gate_policy(recipe))
    assert not held.promote
    assert "guardrail ocr is not measured; guardrail similarity is not" in held.reasons[-1]
    assert build_measured_policy(recipe, cases.WON).guardrails == {}


@pytest.fixture
def name() -> str:
    return f"model-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def pinned(store: Path, name: str) -> tuple[Recipe, MlflowClient]:
    """A model whose first promotion has pinned the policy of the recipe above."""
    recipe = build_recipe(store, name)
    client = connect_to_store(resolve_tracking_uri(recipe))
    client.create_registered_model(name)
    for number in (1, 2):
        client.create_model_version(name, f"file:///nowhere/{number}")
    promote_version(
        cases.tracked(uri=resolve_tracking_uri(recipe)),
        cases.challenger(name, 1),
        {},
        expected_champion=None,
        gate_policy=build_gate_policy(recipe),
    )
    return recipe, client


def test_the_first_promotion_pins_what_it_passed(
    pinned: tuple[Recipe, MlflowClient], name: str
) -> None:
    recipe, client = pinned
    uri = resolve_tracking_uri(recipe)
    assert read_gate_policy(uri, name) == build_gate_policy(recipe)
    (change,) = list_policy_changes(uri, name)
    assert (change["who"], change["from"]) == ("the promotion of version 1", None)
    stricter = build_recipe(Path(recipe.output), name, prompts={"held_out": 128})
    pin_gate_policy(client, name, build_gate_policy(stricter), "another promotion")
    assert find_gate_policy(client, name) == build_gate_policy(recipe), "a recipe changes nothing"


def test_a_version_that_passed_less_is_not_promoted(
    pinned: tuple[Recipe, MlflowClient], name: str
) -> None:
    """The policy may have changed while a person thought about the approval."""
    recipe, client = pinned
    laxer = build_recipe(Path(recipe.output), name, prompts={"held_out": 32})
    with pytest.raises(RegistryError, match="asks for more than this version has passed"):
        promote_version(
            cases.tracked(uri=resolve_tracking_uri(recipe)),
            cases.challenger(name, 2),
            {},
            expected_champion="1",
            gate_policy=build_gate_policy(laxer),
        )
    assert str(client.get_model_version_by_alias(name, "champion").version) == "1"


def test_a_laxer_recipe_fails_before_it_costs_anything(
    pinned: tuple[Recipe, MlflowClient], name: str
) -> None:
    recipe, _ = pinned
    uri = resolve_tracking_uri(recipe)
    require_gate_policy(recipe, uri)
    require_gate_policy(build_recipe(Path(recipe.output), "another-model"), uri)
    laxer = build_recipe(Path(recipe.output), name, evaluation={"confidence": 0.9})
    with pytest.raises(RegistryError, match="asks for more than this recipe: evaluation.conf"):
        require_gate_policy(laxer, uri)


def test_the_held_out_prompts_and_what_rewards_are_loaded_from_are_pinned(tmp_path: Path) -> None:
    words = build_recipe(tmp_path, prompts={"source": "words.txt"})

    def measure(recipe: Recipe, digest: str, weights: str) -> GatePolicy:
        decision = cases.WON.model_copy(
            update={"held_out_digest": digest, "reward_weights": {"ocr": weights}}
        )
        return build_measured_policy(recipe, decision).model_copy(update={"guardrails": {}})

    pinned = measure(words, "a" * 64, "weights")
    assert list_laxer_rules(pinned, pinned) == []
    (other,) = list_laxer_rules(pinned, measure(words, "b" * 64, "weights"))
    assert other == "other held-out prompts of 'words.txt' (the file has changed)"
    assert list_laxer_rules(pinned, measure(words, "a" * 64, "others")) == [
        "ocr is loaded from other weights"
    ]
    more = build_recipe(tmp_path, prompts={"source": "words.txt", "held_out": 128})
    assert list_laxer_rules(pinned, measure(more, "b" * 64, "weights")) == []
    # Random strings are drawn anew for every run.
    strings = build_recipe(tmp_path)
    assert measure(strings, "a" * 64, "weights").held_out_digest == ""


def test_a_run_whose_prompt_file_changed_fails_once_its_prompts_are_read(
    store: Path, name: str
) -> None:
    recipe = build_recipe(store, name, prompts={"source": "words.txt"})
    uri = resolve_tracking_uri(recipe)
    client = connect_to_store(uri)
    client.create_registered_model(name)
    pin_gate_policy(client, name, build_gate_policy(recipe, held_out_digest="a" * 64), "version 1")
    require_gate_policy(recipe, uri)
    require_gate_policy(recipe, uri, "a" * 64)
    with pytest.raises(
        RegistryError, match=r"other held-out prompts of 'words.txt' \(the file has"
    ):
        require_gate_policy(recipe, uri, "b" * 64)
    # The command accepts the new prompts, and the next promotion pins them.
    change_gate_policy(uri, recipe, "the file has more signs")
    require_gate_policy(recipe, uri, "b" * 64)
    pin_gate_policy(client, name, build_gate_policy(recipe, held_out_digest="b" * 64), "version 2")
    policy = read_gate_policy(uri, name)
    assert policy is not None
    assert policy.held_out_digest == "b" * 64
    assert list_policy_changes(uri, name)[-1]["why"] == "completed by what its gate measured"


def test_a_promotion_on_more_prompts_pins_no_digest_of_them(store: Path, name: str) -> None:
    recipe = build_recipe(store, name, prompts={"source": "words.txt"})
    more = build_recipe(store, name, prompts={"source": "words.txt", "held_out": 128})
    uri = resolve_tracking_uri(recipe)
    client = connect_to_store(uri)
    client.create_registered_model(name)
    change_gate_policy(uri, recipe, "64 prompts are enough")
    pin_gate_policy(client, name, build_gate_policy(more, held_out_digest="b" * 64), "version 1")
    # The same file, and the number that is pinned.
    require_gate_policy(recipe, uri, "a" * 64)
    pin_gate_policy(client, name, build_gate_policy(recipe, held_out_digest="a" * 64), "version 2")
    policy = read_gate_policy(uri, name)
    assert policy is not None
    assert policy.held_out_digest == "a" * 64


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., Result]:
    def run(recipe: Recipe, *arguments: str) -> Result:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        return CliRunner().invoke(main, ["gate-policy", str(path), *arguments])

    return run


def test_a_command_changes_the_policy_and_the_change_is_recorded(
    pinned: tuple[Recipe, MlflowClient], name: str, invoke: Callable[..., Result]
) -> None:
    recipe, _ = pinned
    uri = resolve_tracking_uri(recipe)
    laxer = build_recipe(Path(recipe.output), name, prompts={"held_out": 32})
    shown = invoke(laxer)
    assert shown.exit_code == 1
    assert "held_out: 64" in shown.output
    assert "asks for less: prompts.held_out = 32, below 64" in shown.output
    unexplained = invoke(laxer, "--set")
    assert (unexplained.exit_code, "needs a reason" in unexplained.output) == (1, True)
    done = invoke(laxer, "--set", "--reason", "the benchmark has 32 prompts")
    assert (done.exit_code, "held_out: 32" in done.output) == (0, True)
    require_gate_policy(laxer, uri)
    _, change = list_policy_changes(uri, name)
    assert change["why"] == "the benchmark has 32 prompts"
    assert "@" in change["who"]
    assert change["when"].startswith("20")
    assert (change["from"]["held_out"], change["to"]["held_out"]) == (64, 32)


def test_a_model_without_a_promotion_has_no_policy(
    store: Path, name: str, invoke: Callable[..., Result]
) -> None:
    recipe = build_recipe(store, name)
    connect_to_store(resolve_tracking_uri(recipe))
    assert "has no gate policy yet" in invoke(recipe).output
    with pytest.raises(RegistryError):
        change_gate_policy(resolve_tracking_uri(recipe), recipe, "why not")


@pytest.mark.parametrize(
    "settings",
    [
        {"promotion": {"guardrail_tolerance": {"default": 1e308}}},
        {"promotion": {"guardrail_tolerance": {"absolute": {"ocr": 1e308}}}},
        {"promotion": {"margins": {"entropy": 1e9}}},
        {"evaluation": {"confidence": 0.51}},
    ],
)
def test_a_gate_that_lets_everything_pass_is_no_recipe(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Recipe.model_validate({"guardrails": ["ocr"], "rewards": ["similarity"], **settings})
