"""What can be checked about a recipe before anything is paid for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.rewards.combine import load_scorer


def check_recipe(recipe: Recipe, tracking_uri: str, on_cluster: bool) -> None:
    """Check the places that a recipe names and the rewards that it trains on.

    Args:
        tracking_uri: what the recipe and the environment resolve to.
        on_cluster: every task has a pod of its own, and what is on a pod's disk is gone with it.

    Raises:
        RecipeError: an output folder that cannot be written or reached, a prompt file or base model that is not there, a password
            in the tracking URI (it would travel with the run).
        ModelError: a base-model folder that is not one.
        RewardError: a reward that cannot run here.
    """
    if on_cluster:
        _check_shared(recipe.output, tracking_uri)
    if urlsplit(tracking_uri).password:
        raise RecipeError(
            "the tracking URI holds a password, which would end up in logs and reports; take it out and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if "://" not in recipe.output:
        _check_writable(Path(recipe.output))
    if recipe.prompts.source and "://" not in recipe.prompts.source and not Path(recipe.prompts.source).is_file():
        raise RecipeError(f"prompts.source = {recipe.prompts.source!r}: there is no such file; leave it out to make prompts up")
    if recipe.model.path and "://" not in recipe.model.path:
        from ebbflow.models.glyph import check_glyph_folder  # brings torch along

        check_glyph_folder(Path(recipe.model.path))
    load_scorer(recipe.rewards.terms, recipe.rewards.guards)


def _check_shared(output: str, tracking_uri: str) -> None:
    if "://" not in output:
        raise RecipeError(f"output = {output!r} is a folder of this pod and gone with it; name a URI such as s3://bucket/runs")
    if tracking_uri.startswith(("sqlite:", "file:")):
        raise RecipeError(
            f"runs would be tracked in {tracking_uri}, on the disk of this pod; set tracking.uri, or MLFLOW_TRACKING_URI in "
            "every pod, to a server"
        )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(f"output = {str(folder)!r} cannot be written ({error.strerror}); name another folder") from None
