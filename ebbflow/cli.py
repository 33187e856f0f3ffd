"""The ``ebbflow`` command: what a recipe may say, and whether one can be run."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.algorithms import BUILT_IN, import_path
from ebbflow.recipe.base import explain
from ebbflow.recipe.choices import SAMPLERS, STOCHASTIC_SAMPLERS, WINDOWS
from ebbflow.recipe.rewards import REWARD_NAMES, REWARDS, CustomReward, Ocr, Rewards, Tesseract


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
    rewards = [config.path for config in (*recipe.rewards.terms, *recipe.rewards.guards) if isinstance(config, CustomReward)]
    return [*rewards, *([recipe.model.family] if ":" in recipe.model.family else [])]


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--processes",
    default=2,
    show_default=True,
    envvar="EBBFLOW_TRAIN_PROCESSES",
    type=click.IntRange(min=1),
    help="Of an offline stage's training.",
)
def estimate(recipe: Path, processes: int) -> None:
    """Say what RECIPE will take: memory of each process, evaluations of the network, bytes kept. Nothing is run or fetched."""
    from ebbflow import estimate as estimates  # with ebbflow.models: brings torch along
    from ebbflow.models import ModelError
    from ebbflow.models.sizes import SizeError

    try:
        click.echo(estimates.describe(estimates.estimate(load_recipe(recipe), processes)))
    except (RecipeError, SizeError, ModelError) as error:
        sys.exit(str(error))


@main.command()
def keys() -> None:
    """Print every key that a recipe may have, with its default and its meaning."""
    for place, default, meaning in _keys(Recipe, "", {}):
        click.echo(click.style(place, bold=True) + (f" = {default}" if default is not None else ""))
        if meaning:
            click.echo(f"    {meaning}")


@main.command()
@click.argument("policy", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--base", required=True, type=click.Path(exists=True, path_type=Path), help="Folder of the policy's base model.")
def export(policy: Path, target: Path, base: Path) -> None:
    """Write POLICY, a policy folder, into TARGET as a pipeline folder for diffusers, LoRA merged in."""
    from ebbflow.models import ModelError  # brings torch along
    from ebbflow.storage.artifacts import ArtifactError
    from ebbflow.training.card import PolicyError
    from ebbflow.training.export import export_pipeline

    try:
        export_pipeline(base, policy, target)
    except (ArtifactError, ModelError, PolicyError) as error:
        sys.exit(str(error))
    click.echo(f"{target}: DiffusionPipeline.from_pretrained loads it")


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--to", type=click.IntRange(min=1), help="The version to make champion; left out, the previous champion.")
def rollback(recipe: Path, to: int | None) -> None:
    """Make the previous champion of the model that RECIPE promotes champion again."""
    from ebbflow.tracking import registry  # brings MLflow along
    from ebbflow.tracking.store import TrackingError, resolve_tracking_uri

    try:
        resolved = load_recipe(recipe)
        name = resolved.promotion.model_name
        done = registry.rollback(resolve_tracking_uri(resolved), name, None if to is None else str(to))
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    click.echo(f"{name}: version {done.version} is champion again, in place of version {done.previous}")
    click.echo(
        f"The next run is compared with version {done.version}; rolling back once more brings version {done.previous} back."
    )


@main.command()
@click.argument("family")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Of the random weights.")
def tiny(family: str, folder: Path, seed: int) -> None:
    """Write a tiny model of FAMILY with random weights into FOLDER, in the published layout, for trying a recipe out."""
    from ebbflow.models import ModelError  # brings torch along
    from ebbflow.models.tiny import build_tiny

    try:
        build_tiny(family, folder, seed)
    except ModelError as error:
        sys.exit(str(error))
    click.echo(f"{folder}: a tiny {family}, to be named in model.path")


@main.command("list")
def list_choices() -> None:
    """List the algorithms, samplers, windows and rewards that a recipe can name."""
    from ebbflow.rewards.combine import load_reward  # brings pandas and the like along

    _table("algorithms", {config.model_fields["name"].default: (_summary(config), config.stages) for config in BUILT_IN})
    _table("samplers", {name: (text, ("log-probs",) * (name in STOCHASTIC_SAMPLERS)) for name, text in SAMPLERS.items()})
    _table("windows", {name: (text, ()) for name, text in WINDOWS.items()})
    missing: dict[str, str | None] = {config.name: load_reward(config).unavailable() for config in (Ocr(), Tesseract())}
    names = dict(zip(REWARD_NAMES, REWARDS, strict=True))
    _table("rewards", {name: (_summary(config), ("not here",) if missing.get(name) else ()) for name, config in names.items()})
    for reason in filter(None, missing.values()):
        click.echo(f"  {reason}")
    click.echo("Your own: {name: custom, path: package.module:ALGORITHM}; a reward by package.module:Name (docs/extending.md).")


@main.command("serve-reward")
@click.argument("reward", metavar="NAME_OR_JSON")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; one of the network needs a token.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option("--token-variable", help="Environment variable with the bearer token that requests must carry.")
def serve_reward(reward: str, host: str, port: int, token_variable: str | None) -> None:
    """Serve a reward of this machine to the 'remote' reward of others (docs/rewards.md).

    NAME_OR_JSON is what a recipe would have in rewards.terms: ocr, or '{"name": "ocr", "layout": "page"}'.
    """
    from ebbflow.rewards.combine import RewardError  # with fastapi: nothing that the other commands need
    from ebbflow.rewards.http import NoAnswer, read_token
    from ebbflow.rewards.server import serve

    try:
        (config,) = Rewards.model_validate({"terms": [yaml.safe_load(reward)], "guards": []}).terms
        serve(config, host, port, read_token(token_variable))
    except ValidationError as error:
        sys.exit(explain(error, Rewards))
    except (yaml.YAMLError, RecipeError, RewardError, NoAnswer) as error:
        sys.exit(str(error))


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
