"""``ebbflow clean``: delete what a retention does not keep."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ebbflow.commands.loading import REGISTRY, import_libraries
from ebbflow.recipe import RecipeError, load_recipe


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    help="Finished runs of RECIPE that keep all their files; left out, its retention.keep_runs.",
)
@click.option(
    "--rejected-days",
    type=click.FloatRange(min=0),
    help="Days after which versions that were never champion lose their weights; left out,"
    " retention.keep_rejected_days of RECIPE.",
)
@click.option("--yes", is_flag=True, help="Delete. Without it, only say what would be deleted.")
def clean(recipe: Path, runs: int | None, rejected_days: float | None, yes: bool) -> None:
    """List what may be deleted of the runs and versions of RECIPE; with --yes, delete it.

    The champion, its predecessor, the anchor, every version that was champion, their runs, and runs
    that have not finished are never deleted. With --yes, equal folders of a local output folder
    then share their files: a base model is stored once.
    """
    with import_libraries(REGISTRY):
        from ebbflow.recipe.retention import RetentionConfig
        from ebbflow.retention import (  # imports MLflow
            delete_all,
            link_equal_folders,
            list_deletions,
        )
        from ebbflow.tracking.store import TrackingError, resolve_tracking_uri

    try:
        settings = load_recipe(recipe)
        own = settings.retention
        retention = RetentionConfig(
            keep_runs=own.keep_runs if runs is None else runs,
            keep_rejected_days=own.keep_rejected_days if rejected_days is None else rejected_days,
        )
        if retention == RetentionConfig():
            sys.exit(
                f"{recipe} has no retention, so everything is kept; set retention.keep_runs or"
                " retention.keep_rejected_days, or pass --runs or --rejected-days"
            )
        deletions = list_deletions(settings, retention, resolve_tracking_uri(settings))
        for deletion in deletions:
            click.echo(f"{deletion.num_bytes / 1e6:8.1f} MB  {deletion.what}")
        if not yes:
            total = sum(deletion.num_bytes for deletion in deletions) / 1e6
            click.echo(f"{total:8.1f} MB  would be deleted; pass --yes to delete")
            return
        freed = delete_all(deletions)
        if "://" in settings.output:
            click.echo(f"files of runs in {settings.output} are left to the bucket's rules")
        else:
            freed += link_equal_folders(Path(settings.output))
        click.echo(f"{freed / 1e6:8.1f} MB  freed")
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
