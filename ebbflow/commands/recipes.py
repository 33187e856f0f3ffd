"""``ebbflow check``, ``keys``, ``list`` and ``defaults``: what a recipe may say."""

from __future__ import annotations

import logging
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ebbflow.commands.options import PROCESSES
from ebbflow.formatting import first_doc_paragraph
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.base_folder import ModelError
from ebbflow.recipe.choices import WINDOWS
from ebbflow.recipe.defaults import (
    list_published_defaults,
    write_defaults_page,
    write_defaults_table,
)
from ebbflow.recipe.key_docs import group_keys, read_field_docs
from ebbflow.recipe.registry import ALGORITHMS, REWARDS, configure_reward
from ebbflow.recipe.samplers import SAMPLERS

logger = logging.getLogger(__name__)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@PROCESSES
def check(recipe: Path, processes: int) -> None:
    """Check RECIPE, a YAML file, and what it names, as a run does before it starts; print it with
    all defaults, and how often it samples each prompt.
    """
    from ebbflow.data.captioned import DataError
    from ebbflow.data.pairs import PairError  # imports pyarrow
    from ebbflow.data.prompts import PromptError
    from ebbflow.launch import pin_rewards
    from ebbflow.preflight import check_recipe
    from ebbflow.rewards.base import RewardError

    problems = []
    try:
        resolved = pin_rewards(load_recipe(recipe))
        uri = resolved.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        problems += _list_store_problems(resolved, uri)
        notes = check_recipe(
            resolved,
            uri,
            on_cluster=False,
            processes=processes,
        )
        # A store that does not answer has been reported.
        if not problems:
            notes += _describe_registered_model(resolved, uri)
    except (RecipeError, PromptError, PairError, DataError, RewardError, ModelError) as error:
        problems.append(str(error))
    if problems:
        sys.exit("\n".join(problems))
    click.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
    # Comments of YAML, so that the output is a recipe that can be saved and run.
    for note in notes:
        click.echo(f"# {note}")
    click.echo(f"# digest {resolved.digest}")


def _list_store_problems(recipe: Recipe, uri: str) -> list[str]:
    """List why the MLflow store that the recipe or the environment names cannot be used: one
    sentence, or none.
    """
    # The run makes a SQLite file where there is none, and a check writes nothing.
    if not uri or uri.startswith("sqlite:"):
        return []
    logger.info("asking the MLflow store")
    from ebbflow.tracking.store import (  # imports MLflow
        TrackingError,
        check_store,
        resolve_tracking_uri,
    )

    try:
        check_store(resolve_tracking_uri(recipe))
    except TrackingError as error:
        return [str(error)]
    return []


def _describe_registered_model(recipe: Recipe, uri: str) -> list[str]:
    """Say where the gate of the model that a recipe promotes would refuse whatever it trains, or
    compare with a champion that was trained on held-out prompts, a line each.

    Raises:
        RecipeError: the store cannot be read.
    """
    # Without a store there is no champion, a check makes none, and MLflow takes seconds to import.
    store = uri or f"sqlite:///{Path(recipe.output).absolute() / 'mlflow.db'}"
    if store.startswith("sqlite:///") and not Path(store.removeprefix("sqlite:///")).is_file():
        return []
    from ebbflow.data.prompts import Prompt
    from ebbflow.data.twins import digest_held_out
    from ebbflow.preflight import read_prompt_table
    from ebbflow.registry.gate_policy import describe_laxer_rules
    from ebbflow.registry.trained_prompts import describe_trained_prompts
    from ebbflow.tracking.store import TrackingError

    prepared = read_prompt_table(recipe, on_cluster=False)
    if prepared is None:
        return []
    table = prepared[0]
    held_out = [Prompt(**row) for row in table.to_pylist() if row["split"] == "held_out"]
    try:
        notes = [
            describe_laxer_rules(recipe, store, digest_held_out(table)),
            describe_trained_prompts(store, recipe.promotion.model_name, held_out),
        ]
    except TrackingError as error:
        raise RecipeError(str(error)) from None
    return [note for note in notes if note]


@click.command()
def keys() -> None:
    """Print every recipe key with its default and its meaning."""
    for line in _iterate_keys(Recipe, "", {}):
        if isinstance(line, str):
            click.secho(f"\n# {line}", underline=True)
            continue
        key, default, meaning = line
        click.echo(click.style(key, bold=True) + (f" = {default}" if default is not None else ""))
        if meaning:
            click.echo(f"    {meaning}")


@click.command("list")
def list_choices() -> None:
    """List the algorithms, samplers, windows and rewards that a recipe can use."""
    from ebbflow.rewards.combine import load_reward  # imports numpy

    _print_choices(
        "algorithms",
        {
            name: (first_doc_paragraph(config.__doc__), config.stages)
            for name, config in ALGORITHMS.items()
        },
    )
    _print_choices(
        "samplers",
        {
            name: (facts.description, () if facts.eta is None else ("log-probs",))
            for name, facts in SAMPLERS.items()
        },
    )
    _print_choices("windows", {name: (text, ()) for name, text in WINDOWS.items()})
    # These need packages or a program; the others call a server or fetch a network when they run.
    missing: dict[str, str] = {}
    for name in ("ocr", "tesseract", "similarity"):
        reason = load_reward(configure_reward(name)).explain_unavailable()
        if reason:
            missing[name] = reason
    _print_choices(
        "rewards",
        {
            name: (
                first_doc_paragraph(config.__doc__),
                ("not installed",) if name in missing else (),
            )
            for name, config in REWARDS.items()
        },
    )
    for reason in missing.values():
        click.echo(f"  {reason}")
    click.echo(
        "Your own: {name: custom, path: package.module:ALGORITHM}; a reward by package.module:Name"
        " (docs/extending.md)."
    )


@click.command()
@click.argument(
    "algorithm",
    required=False,
    type=click.Choice(list(list_published_defaults())),
)
def defaults(algorithm: str | None) -> None:
    """Print the defaults of ALGORITHM, or of training on data (sft_on_data, anchor), next to the
    published values and their sources; without it, of all of them.
    """
    click.echo(write_defaults_table(algorithm) if algorithm else write_defaults_page(), nl=False)


def _print_choices(title: str, choices: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """Print aligned lines: name, remarks, description."""
    click.secho(title, bold=True)
    remarks = {name: ", ".join(remark) for name, (_, remark) in choices.items()}
    name_width = max(map(len, choices))
    remark_width = max(map(len, remarks.values()))
    for name, (text, _) in choices.items():
        # Windows have no remarks at all, and then there is no empty column.
        remark = f"{remarks[name]:<{remark_width}}  " if remark_width else ""
        click.echo(f"  {name:<{name_width}}  {remark}{text}")


def _iterate_keys(
    model: type[BaseModel], prefix: str, first_keys: dict[Any, str]
) -> Iterator[tuple[str, Any, str] | str]:
    """Yield (dotted key, default, meaning) of every leaf, and the heading of each group of keys
    before its first key.

    Args:
        prefix: what stands before each key, such as ``"model."``.
        first_keys: the models that were listed, each with its key; extended here. A model is listed
            once: the rewards of a branch, for instance, have the same keys as those of the recipe.

    Example::

        ("stages[](OnlineStage).steps", "100", "Training steps.")
    """
    docs = read_field_docs(model)
    for heading, names in group_keys(model).items():
        if heading:
            yield f"{prefix.removesuffix('.')}: {heading}"
        for name in names:
            yield from _iterate_field(model.model_fields[name], f"{prefix}{name}", docs, first_keys)


def _iterate_field(
    field: FieldInfo, key: str, docs: dict[str, str], first_keys: dict[Any, str]
) -> Iterator[tuple[str, Any, str] | str]:
    """Yield the lines of one key, and of the keys of each model that it can hold."""
    inner = _list_models(field.annotation)
    meaning = " ".join((field.description or docs.get(key.rpartition(".")[2], "")).split())
    if not inner:
        yield key, _describe_default(field), meaning
        return
    if tuple(inner) in first_keys:
        yield key, None, f"{meaning} Keys: see {first_keys[tuple(inner)]}.".strip()
        return
    first_keys[tuple(inner)] = key
    many = "[]" if typing.get_origin(field.annotation) is list else ""
    if len(inner) > 1 and meaning:
        yield f"{key}{many}", None, meaning
    for choice in inner:
        summary = " ".join((choice.__doc__ or "").split())
        # A key that may hold one of several models lists each, with the class as its tag.
        tag = ""
        if len(inner) > 1:
            tag = f"({choice.__name__.removesuffix('Config')})"
        elif meaning:
            summary = f"{meaning} {summary}"
        yield f"{key}{many}{tag}", None, summary
        yield from _iterate_keys(choice, f"{key}{many}{tag}.", first_keys)


def _list_models(annotation: Any) -> list[type[BaseModel]]:
    """List the models inside an annotation such as ``list[Annotated[A | B, ...]]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _list_models(part)]


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    # pydantic wants the values of the other keys for factories that read them; a default shown here
    # is that of a recipe without any.
    return str(field.get_default(call_default_factory=True, validated_data={}))
