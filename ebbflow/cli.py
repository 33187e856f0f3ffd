"""The ``ebbflow`` command: what a recipe may say, and whether one can be run."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ebbflow.recipe import Recipe, RecipeError, load_recipe


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Reinforcement-learning post-training for diffusion and flow-matching models, as a Flyte pipeline.

    The pipeline itself runs with `pyflyte run workflows/post_training.py post_train --recipe FILE`.
    """


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
def check(recipe: Path) -> None:
    """Check RECIPE, a YAML file, and print it with every default filled in."""
    try:
        resolved = load_recipe(recipe)
    except RecipeError as error:
        sys.exit(str(error))
    click.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
    click.echo(f"# digest {resolved.digest}")


@main.command()
def keys() -> None:
    """Print every key that a recipe may have, with its default and its meaning."""
    for place, default, meaning in _keys(Recipe, ""):
        click.echo(click.style(place, bold=True) + (f" = {default}" if default is not None else ""))
        if meaning:
            click.echo(f"    {meaning}")


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every leaf; of a choice between models, each model's keys."""
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        meaning = " ".join((field.description or "").split())
        if not inner:
            yield f"{prefix}{name}", _default(field), meaning
            continue
        many = "[]" if typing.get_origin(field.annotation) is list else ""
        for choice in inner:
            tag = f"({choice.__name__})" if len(inner) > 1 else ""
            summary = " ".join((choice.__doc__ or "").split())
            yield f"{prefix}{name}{many}{tag}", None, summary
            yield from _keys(choice, f"{prefix}{name}{many}{tag}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The recipe models inside an annotation such as ``list[Annotated[A | B, ...]]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _default(field: FieldInfo) -> str:
    return "(required)" if field.is_required() else str(field.get_default(call_default_factory=True, validated_data={}))
