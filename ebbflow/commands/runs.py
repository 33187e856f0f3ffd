"""``ebbflow run``, ``runs``, ``compare``, ``replay`` and ``ui``: start a run, and look at runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from ebbflow.commands.loading import import_libraries
from ebbflow.commands.options import PROCESSES, STORE
from ebbflow.extras import require
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.output_folder import refuse_root_folder


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def run(recipe: Path, debug: bool) -> None:
    """Run the pipeline on RECIPE on this machine; a run that was stopped resumes.

    Exits with status 1 after an error, 130 after Ctrl-C.
    """
    # It handles signals and its own errors: Ctrl-C during a run says how to resume.
    from ebbflow.launch import launch_recipe

    launch_recipe(recipe, debug)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
def runs(folder: Path) -> None:
    """List the runs in FOLDER, the 'output' of their recipes (default: runs), the newest first."""
    # Files alone: it works while the MLflow server is away, and without MLflow.
    from ebbflow.run_list import describe_runs, list_runs

    listed = list_runs(folder)
    if not listed:
        sys.exit(
            f"no runs in {folder}; start one with `ebbflow run RECIPE`, or name the recipe's"
            " 'output'"
        )
    click.echo(describe_runs(listed))


@click.command()
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page; default: RUN-and-RUN.html.",
)
def compare(first: str, second: str, output: Path | None) -> None:
    """Compare two runs, each the folder of a local run or the URI of a copy of one: what their
    recipes change, the curves of their stages, held-out scores and pictures, on one HTML page.

    To compare their policies by the rules of the gate on the same noise, use `ebbflow evaluate`.
    """
    with import_libraries("drawing the curves and pictures of both runs"):
        from ebbflow.comparison.run_page import write_run_page  # imports matplotlib
        from ebbflow.comparison.runs import RunFolderError, find_recipe_differences, open_run_folder

    try:
        with tempfile.TemporaryDirectory(prefix="ebbflow-compare-") as scratch:
            runs = [
                # Copies in two buckets may have the same name.
                open_run_folder(named, Path(scratch) / str(number))
                for number, named in enumerate((first, second))
            ]
            page = output or Path(f"{runs[0].name}-and-{runs[1].name}.html")
            refuse_root_folder(page, "output")
            write_run_page(page, *runs)
    except (RunFolderError, RecipeError, OSError) as error:
        sys.exit(str(error))
    for key, *values in find_recipe_differences(*runs):
        click.echo(f"{key}: {' -> '.join(values)}")
    click.echo(f"page    {page}")


@click.command()
@click.argument("run")
@click.option(
    "--stage",
    required=True,
    help="As the report calls it: 1.1 is the first stage of the first round.",
)
@click.option(
    "--step",
    required=True,
    type=click.IntRange(min=0),
    help="Training step, from zero, as its metrics are logged.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A new or empty folder; left out, replay-STAGE-STEP.",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Folder of the base model, where the run no longer has it.",
)
@PROCESSES
@STORE
def replay(
    run: str,
    stage: str,
    step: int,
    output: Path | None,
    base: Path | None,
    processes: int,
    recipe: Path | None,
) -> None:
    """Replay a training step of RUN: generate its samples again, and show them with their scores
    and advantages.

    RUN is the folder of a local run or the id of its MLflow run. The policy is trained again up to
    the step.
    """
    with import_libraries():
        from ebbflow.models import ModelError  # imports torch
        from ebbflow.replay.output import PAGE
        from ebbflow.replay.tracked_step import replay_step
        from ebbflow.rewards.base import RewardError
        from ebbflow.storage.artifacts import ArtifactError
        from ebbflow.tracking.store import TrackingError
        from ebbflow.training.policy_metadata import PolicyError
        from ebbflow.training.replay import ReplayError

    # "1.1 online" and "1.1" name the same stage, and have the same folder.
    target = output or Path(f"replay-{stage.partition(' ')[0]}-{step}")
    try:
        refuse_root_folder(target, "output")
        result = replay_step(
            run, stage, step, target, load_recipe(recipe) if recipe else None, base, processes
        )
    except (
        RecipeError,
        TrackingError,
        ReplayError,
        ArtifactError,
        ModelError,
        PolicyError,
        RewardError,
    ) as error:
        sys.exit(str(error))
    click.echo(f"{target / PAGE}: {result}")


@click.command()
@STORE
@click.option("--port", default=5000, show_default=True, type=click.IntRange(1, 65535))
@click.option(
    "--browser/--no-browser",
    default=True,
    help="Whether to open the page of the runs in a browser.",
)
def ui(recipe: Path | None, port: int, browser: bool) -> None:
    """Serve MLflow's UI on 127.0.0.1, and print the addresses of runs, reward curves and
    registry."""
    # MLflow is imported by the server alone, whose error would be a traceback.
    require("ebbflow ui", "mlflow")
    with import_libraries("starting MLflow, which takes seconds"):
        from ebbflow.tracking.store import TrackingError, resolve_tracking_uri
        from ebbflow.tracking.ui import serve_ui

    try:
        # Without a recipe: the store of the environment, or the one of local runs.
        settings = load_recipe(recipe) if recipe else Recipe()
        uri = resolve_tracking_uri(settings)
        sys.exit(serve_ui(uri, settings.tracking.experiment, port, browser, click.echo))
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
