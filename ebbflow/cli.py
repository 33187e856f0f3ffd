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
from ebbflow.recipe.algorithms import BUILT_IN, import_path
from ebbflow.recipe.choices import SAMPLERS, STOCHASTIC_SAMPLERS, WINDOWS


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
        for path in _paths(resolved):
            import_path(path)
    except RecipeError as error:
        sys.exit(str(error))
    click.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
    click.echo(f"# digest {resolved.digest}")


def _paths(recipe: Recipe) -> list[str]:
    """Where the recipe names a reward or a model family of the user's own; its algorithms were imported when it was read."""
    names = [*(term.name for term in recipe.rewards.terms), *recipe.rewards.guards, recipe.model.family]
    return [name for name in names if ":" in name]


@main.command()
def keys() -> None:
    """Print every key that a recipe may have, with its default and its meaning."""
    for place, default, meaning in _keys(Recipe, "", {}):
        click.echo(click.style(place, bold=True) + (f" = {default}" if default is not None else ""))
        if meaning:
            click.echo(f"    {meaning}")


@main.command("list")
def list_choices() -> None:
    """List the algorithms, samplers, windows and rewards that a recipe can name."""
    from ebbflow.rewards.combine import REWARDS  # brings the OCR along

    _table("algorithms", {config.model_fields["name"].default: (_summary(config), config.stages) for config in BUILT_IN})
    _table("samplers", {name: (text, ("log-probs",) * (name in STOCHASTIC_SAMPLERS)) for name, text in SAMPLERS.items()})
    _table("windows", {name: (text, ()) for name, text in WINDOWS.items()})
    missing = {name: make().unavailable() for name, make in REWARDS.items()}
    _table("rewards", {name: (_summary(make), ("not here",) if missing[name] else ()) for name, make in REWARDS.items()})
    for reason in filter(None, missing.values()):
        click.echo(f"  {reason}")
    click.echo("Your own: {name: custom, path: package.module:ALGORITHM}; a reward by package.module:Name (docs/extending.md).")


def _table(title: str, choices: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """Aligned lines: the name, remarks, and what it is."""
    click.secho(title, bold=True)
    remarks = {name: ", ".join(remark) for name, (_, remark) in choices.items()}
    wide, far = max(map(len, choices)), max(map(len, remarks.values()))
    for name, (text, _) in choices.items():
        click.echo(f"  {name:<{wide}}  " + (f"{remarks[name]:<{far}}  " if far else "") + text)


def _summary(described: Any) -> str:
    return (described.__doc__ or "").strip().splitlines()[0]


def _keys(model: type[BaseModel], prefix: str, shown: dict[Any, str]) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every leaf; of a choice between models, each model's keys, once (``shown``: where)."""
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        meaning = " ".join((field.description or "").split())
        if not inner:
            yield f"{prefix}{name}", _default(field), meaning
            continue
        if tuple(inner) in shown:
            yield f"{prefix}{name}", None, f"{meaning} Keys as under {shown[tuple(inner)]}.".strip()
            continue
        shown[tuple(inner)] = f"{prefix}{name}"
        many = "[]" if typing.get_origin(field.annotation) is list else ""
        for choice in inner:
            tag = f"({choice.__name__})" if len(inner) > 1 else ""
            summary = " ".join((choice.__doc__ or "").split())
            yield f"{prefix}{name}{many}{tag}", None, summary
            yield from _keys(choice, f"{prefix}{name}{many}{tag}.", shown)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The recipe models inside an annotation such as ``list[Annotated[A | B, ...]]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models(part)]


def _default(field: FieldInfo) -> str:
    return "(required)" if field.is_required() else str(field.get_default(call_default_factory=True, validated_data={}))
