"""docs/rewards.md names every reward, and its examples are valid."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
import yaml

from ebbflow.recipe import Recipe
from ebbflow.recipe.registry import REWARDS
from ebbflow.rewards import http, server, server_limits
from ebbflow.rewards.protocol import (
    MAX_JSON_VALUES,
    Health,
    ScoreAnswer,
    ScoreRequest,
    identify_image,
)

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
RECIPES = [yaml.safe_load(block) for kind, block in BLOCKS if kind == "yaml"]
MESSAGES = [block for kind, block in BLOCKS if kind == "json"]


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_has_its_row(name):
    assert re.search(rf"^\| `{name}` \|", TEXT, re.MULTILINE)


def test_every_reward_has_an_example():
    parts = [Recipe.model_validate(recipe) for recipe in RECIPES]
    assert {
        config.name for recipe in parts for config in (*recipe.rewards, *recipe.guardrails)
    } >= set(REWARDS) - {"similarity"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_example_is_a_recipe(recipe):
    assert recipe.keys() <= {"rewards", "guardrails", "max_failed_share", "prompts", "model"}
    resolved = Recipe.model_validate(recipe)
    assert [config.name for config in resolved.rewards] == [
        reward["name"] for reward in recipe["rewards"]
    ]


def test_the_messages_are_those_of_the_protocol():
    request, answer, health = MESSAGES
    asked = ScoreRequest.model_validate_json(request)
    answered = ScoreAnswer.model_validate_json(answer)
    assert server._decode_images(asked.images).shape == (1, 8, 8, 3)
    assert answered.failures.keys() == {0}
    assert answered.ids == [identify_image(base64.b64decode(image)) for image in asked.images]
    assert json.loads(health) == Health(reward="geneval", ready=True).model_dump(
        exclude_defaults=True
    )
    for message in (ScoreRequest, ScoreAnswer, Health):
        assert all(f'"{key}"' in TEXT for key in message.model_fields)


@pytest.mark.parametrize("config", REWARDS.values(), ids=list(REWARDS))
def test_every_key_of_its_own_is_on_the_page(config):
    keys = config.model_fields.keys() - {"name", "weight", "label"}
    assert [key for key in keys if not re.search(rf"[`{{ ]{key}[:`]", TEXT)] == []


def test_the_limits_are_those_of_the_server():
    assert f"| {server_limits.MAX_BYTES >> 20} MiB | 413 |" in TEXT
    assert (
        f"| {server.MAX_IMAGES}, {server.MAX_PIXELS >> 20} Mi, {server.MAX_CHUNKS:,} | 413 |"
        in TEXT
    )
    assert f"| {MAX_JSON_VALUES:,} | 413 |" in TEXT
    assert f"| {server_limits.MAX_HELD >> 30} GiB |" in TEXT
    assert f"| {server_limits.HEADER_SECONDS:g} s |" in TEXT
    assert f"| {server_limits.BODY_SECONDS:g} s | 408 |" in TEXT
    assert f"| {server_limits.MAX_CONNECTIONS}, at most a quarter" in TEXT
    assert http.HOSTS in TEXT
    assert f"at most {http.SHOWN} characters" in TEXT


def test_the_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
