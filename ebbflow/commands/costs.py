"""``ebbflow estimate`` and ``plan``: what a recipe costs, before it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ebbflow.commands.options import PROCESSES
from ebbflow.estimate.gpus import GPU_TYPES
from ebbflow.recipe import RecipeError, load_recipe
from ebbflow.recipe.base_folder import ModelError


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@PROCESSES
@click.option(
    "--tflops",
    type=click.FloatRange(0, min_open=True),
    help=(
        "Floating-point operations in a second that a GPU sustains, in 10^12: gives hours. A third"
        " to half of its data sheet."
    ),
)
@click.option(
    "--context-parallel",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Processes for each sample.",
)
def estimate(recipe: Path, processes: int, tflops: float | None, context_parallel: int) -> None:
    """Estimate what RECIPE needs: memory per process, network evaluations, storage, hours. Nothing
    is run or downloaded.
    """
    from ebbflow.data.model_sizes import SizeError  # imports numpy
    from ebbflow.estimate.measured import measure_cached
    from ebbflow.estimate.run import estimate_from_sizes, measure_sizes
    from ebbflow.estimate.text import describe_estimate

    # A mistake in the options alone, so it is reported before the recipe is read.
    if processes % context_parallel:
        raise click.ClickException(
            f"--context-parallel {context_parallel} does not divide --processes {processes}; change"
            " one of them"
        )
    try:
        resolved = load_recipe(recipe)
        if context_parallel > 1:
            from ebbflow.models.sizes import check_shared_tokens  # imports torch

            check_shared_tokens(resolved, context_parallel)
        # Sizes come from the model's configuration, measured once and cached; no weights are read.
        sizes, sample, evaluated = measure_sizes(resolved, measure_cached)
        result = estimate_from_sizes(
            resolved, processes, sizes, sample, 1, "full", context_parallel, evaluated
        )
        click.echo(describe_estimate(result, tflops))
    except (RecipeError, SizeError, ModelError) as error:
        sys.exit(str(error))


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--gpus",
    required=True,
    type=click.IntRange(min=2),
    help="To divide between training, rollouts and rewards.",
)
@click.option(
    "--gpu",
    default="h100",
    show_default=True,
    type=click.Choice(list(GPU_TYPES)),
    help="Their type: memory, and 40 % of the data sheet's TFLOP/s where nothing else is given.",
)
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="As of `ebbflow estimate`.")
@click.option(
    "--price", type=click.FloatRange(0, min_open=True), help="Of an hour of a GPU; gives prices."
)
@click.option(
    "--timeline",
    type=click.Path(exists=True, path_type=Path),
    help="timeline.json of a run of the stage, measured.",
)
@click.option(
    "--network",
    default=50.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="10^9 bytes in a second between nodes of 8 GPUs.",
)
def plan(
    recipe: Path,
    gpus: int,
    gpu: str,
    tflops: float | None,
    price: float | None,
    timeline: Path | None,
    network: float,
) -> None:
    """Plan the online stages of RECIPE for a number of GPUs: all of them colocated, the best split
    in each mode, the keys of the fastest, and where more GPUs stop helping.
    """
    from ebbflow.data.model_sizes import SizeError  # imports numpy
    from ebbflow.estimate.measured import measure_cached
    from ebbflow.estimate.plan import PlanError
    from ebbflow.estimate.plan_text import describe_plans
    from ebbflow.estimate.run import estimate_from_sizes, measure_sizes

    try:
        resolved = load_recipe(recipe)
        # A plan covers online stages: the sizes of an evaluation play no part.
        sizes, sample, _ = measure_sizes(resolved, measure_cached)
        # For one process: the plan itself divides the work between processes.
        result = estimate_from_sizes(resolved, 1, sizes, sample)
        click.echo(describe_plans(result, gpus, tflops, timeline, network, gpu, price))
    except (RecipeError, SizeError, PlanError, ModelError) as error:
        sys.exit(str(error))
