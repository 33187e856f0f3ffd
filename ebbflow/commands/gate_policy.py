"""``ebbflow gate-policy``: what a registered model's candidates have to pass."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import yaml

from ebbflow.commands.loading import REGISTRY, import_libraries
from ebbflow.recipe import RecipeError, load_recipe
from ebbflow.recipe.gate_policy import build_gate_policy, list_laxer_rules


@click.command("gate-policy")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "is_set",
    is_flag=True,
    help="Pin the rules of RECIPE to its model, for all runs from now on.",
)
@click.option("--reason", default="", help="Why, for the record; needed with --set.")
def gate_policy(recipe: Path, is_set: bool, reason: str) -> None:
    """Show or change the gate policy that is pinned to the model of RECIPE.

    It is shown with its changes. The status is 1 where RECIPE asks for less.

    The first promotion of a model pins what it passed: the source and number of held-out prompts,
    confidence, guardrails with their tolerances, margins, and whether a person approves.
    """
    with import_libraries(REGISTRY):
        from ebbflow.registry.gate_policy import (  # imports MLflow
            change_gate_policy,
            list_policy_changes,
            read_gate_policy,
        )
        from ebbflow.tracking.store import TrackingError, resolve_tracking_uri

    try:
        resolved = load_recipe(recipe)
        uri = resolve_tracking_uri(resolved)
        name = resolved.promotion.model_name
        if is_set:
            change_gate_policy(uri, resolved, reason)
        changes = list_policy_changes(uri, name)
        pinned = read_gate_policy(uri, name)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    if pinned is None:
        click.echo(f"{name} has no gate policy yet: its first promotion pins one")
        return
    click.echo(yaml.safe_dump({name: pinned.model_dump()}, sort_keys=False).rstrip())
    for number, change in enumerate(changes, 1):
        click.echo(f"change {number}: {change['when']} by {change['who']}: {change['why']}")
    laxer = list_laxer_rules(pinned, build_gate_policy(resolved))
    if laxer:
        sys.exit(f"{recipe} asks for less: {'; '.join(laxer)}")
