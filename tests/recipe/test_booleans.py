"""true and false are no numbers, and numbers are neither true nor false: not in a recipe, not in
what it brings along.
"""

from __future__ import annotations

import json
import re
import typing
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.base import Strict
from ebbflow.recipe.registry import ALGORITHMS, REWARDS, configure_reward
from tasks.deployment import DeploymentConfig, DeploymentError, read_deployment

WRONG = {
    "optimizer.lr": {"stages": [{"kind": "online", "optimizer": {"lr": True}}]},
    "stages.0.online.steps": {"stages": [{"kind": "online", "steps": True}]},
    "seed": {"seed": False},
    "rounds": {"rounds": True},
    "rewards.0.ocr.weight": {"rewards": [{"name": "ocr", "weight": True}]},
    "promotion.approval": {"promotion": {"approval": True}},
    "profile.steps.1": {"stages": [{"kind": "online", "profile": {"steps": [0, True]}}]},
    "model.training.lr": {"model": {"training": {"lr": True}}},
    "algorithm.diffusion_nft.beta": {
        "stages": [{"kind": "offline", "algorithm": {"name": "diffusion_nft", "beta": True}}]
    },
}


@pytest.mark.parametrize(("key", "recipe"), WRONG.items(), ids=WRONG)
@pytest.mark.parametrize(
    "read", [Recipe.model_validate, lambda recipe: Recipe.model_validate_json(json.dumps(recipe))]
)
def test_true_and_false_are_no_numbers(read, key, recipe):
    with pytest.raises(RecipeError) as error:
        read(recipe)
    assert re.search(
        rf"{re.escape(key)} = {key != 'seed'}: Input should be a valid (number|integer)",
        str(error.value),
    )


@pytest.mark.parametrize("number", [0, 1, 1.0])
def test_numbers_are_neither_true_nor_false(number):
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate({"model": {"gradient_checkpointing": number}})
    assert f"model.gradient_checkpointing = {number}: Input should be a valid boolean" in str(
        error.value
    )


def test_every_problem_is_still_named_at_once():
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(
            {"seed": True, "rounds": False, "stop": {"patience": True, "min_delta": -1}}
        )
    shown = [line.split(":")[0] for line in str(error.value).splitlines()[1:]]
    assert shown == ["seed = True", "rounds = False", "stop.patience = True", "stop.min_delta = -1"]


def test_a_deployment_reads_no_number_from_true(tmp_path):
    for key, text in {
        "light.gpus": "light: {gpus: true}",
        "light.interruptible": "light: {interruptible: 1}",
    }.items():
        path = tmp_path / "deployment.yaml"
        path.write_text(text)
        with pytest.raises(DeploymentError, match=rf"{key} = \S+: Input should be"):
            read_deployment({"EBBFLOW_DEPLOYMENT": str(path)})


def test_numbers_that_yaml_reads_as_text_are_numbers():
    recipe = Recipe.model_validate(
        {"stages": [{"kind": "online", "optimizer": {"lr": "3e-4"}}]}
    )  # YAML wants 3.0e-4
    assert recipe.stages[0].optimizer.lr == 3e-4


def models(annotation: Any) -> set[type[BaseModel]]:
    """Every model inside an annotation, those of their fields included."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}.union(
            *(models(field.annotation) for field in annotation.model_fields.values())
        )
    return set().union(*map(models, typing.get_args(annotation)))


ALL = sorted(
    {*models(Recipe), *models(DeploymentConfig), *ALGORITHMS.values(), *REWARDS.values()},
    key=lambda model: model.__name__,
)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_no_field_of_any_model_takes_true_for_a_number(model):
    assert issubclass(model, Strict)
    for name, field in model.model_fields.items():
        if {int, float} & {field.annotation, *typing.get_args(field.annotation)}:
            with pytest.raises((ValidationError, RecipeError)) as error:
                model.model_validate({name: True})
            assert re.search(
                rf"{name}\W+Input should be a valid|{name} = True: Input should be a valid",
                str(error.value),
            )


def test_the_field_is_named_where_a_user_calls_the_model_alone():
    with pytest.raises(ValidationError) as error:
        configure_reward("remote", url="http://127.0.0.1:1", timeout=True)
    assert error.value.errors()[0]["loc"] == ("remote", "timeout")
